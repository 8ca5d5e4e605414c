"""What the processes of test_parallel.py run: `play`. It imports little, as starting them takes most of the time."""

import functools
import importlib
import json
import math
import shutil
import sys
from pathlib import Path

import torch
from helpers import TINY_LM, only_run

import train_lm
from engine import parallel
from engine.device import seed_all, setup
from engine.optim import clip_gradients

STEPS, MICROS = 10, 4
CURVES = {
    "threshold": dict(router="threshold", expert_ffns=2, split=4),
    "topk, no drops": dict(router="topk", expert_ffns=4, split=2, capacity=math.inf),
    "hypersphere": dict(router="hypersphere", expert_ffns=8, split=1),
}


def curve(case: str, context) -> dict:
    """Ten steps of SGD, which reveals gradients of the wrong scale, with clipping."""
    config = train_lm.Config(**TINY_LM | {"dtype": "float64"} | CURVES[case])
    seed_all(0)
    gpt = context.place(train_lm.GPT(config, 40))
    forward = parallel.wrap(gpt, config, context)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.3, foreach=False)
    losses, micros = [], range(context.rank, MICROS, context.world)
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            forward.require_backward_grad_sync = micro == micros[-1]
            seed_all(1, step, micro)
            ids = 39 - torch.randint(40, (4, 17)).float().sqrt().mul(6.3).long().clamp(max=39)  # skewed
            loss, balance = forward(ids[:, :-1], ids[:, 1:])
            loss = loss + 0.1 * balance
            (loss / len(micros)).backward()
            total += loss.detach() / MICROS
        storages = len({p.grad.untyped_storage().data_ptr() for p in gpt.parameters()})
        clip_gradients(gpt, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        gpt.after_step(context.sum)
        losses.append(float(context.sum(total)))
    return {"losses": losses, "weights": gpt.state_dict(), "storages of gradients": storages}


def play(out: Path):
    """Runs the curves, then the commands of commands.json."""
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # compiles fast
    context, to_none, zero_grad = setup("cpu", "float64"), {}, torch.optim.AdamW.zero_grad

    def note(self, set_to_none=True):
        to_none[sys.argv[0]] = set_to_none
        zero_grad(self, set_to_none)

    torch.optim.AdamW.zero_grad = note
    for case in CURVES:
        result = curve(case, context)
        if context.rank == 0:
            torch.save(result, out / f"{context.world}, {case}.pt")
    for script, options, begun in json.loads((out / "commands.json").read_text()):
        if begun and context.rank == 0:
            half_done(Path(begun), Path(options[1 + options.index("--out_dir")]))
        context.barrier()
        sys.argv = [script, *options]
        importlib.import_module(script).main()
    torch.optim.AdamW.zero_grad = zero_grad
    (out / "done").write_text(json.dumps(to_none))


def half_done(finished: Path, new: Path):
    """Copies a run as of its previous checkpoint."""
    shutil.copytree(finished, new)
    run = only_run(new)
    (run / "result.json").unlink()
    (run / "ckpt.prev.pt").replace(run / "ckpt.pt")


if __name__ == "__main__":
    play(Path(sys.argv[1]))
