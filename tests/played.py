"""What the processes of test_parallel.py do: `play`. It imports little: starting them is most of what they cost."""

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
    """Ten steps of plain gradient descent, which shows a gradient of the wrong size, under a limit of its norm."""
    config = train_lm.Config(**TINY_LM | {"dtype": "float64"} | CURVES[case])
    seed_all(0)
    gpt = context.place(train_lm.GPT(config, 40))
    forward = parallel.wrap(gpt, config, context)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.3, foreach=False)
    losses, mine = [], range(context.rank, MICROS, context.world)
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in mine:
            forward.require_backward_grad_sync = micro == mine[-1]
            seed_all(1, step, micro)
            ids = 39 - torch.randint(40, (4, 17)).float().sqrt().mul(6.3).long().clamp(max=39)  # some come more often
            loss, balance = forward(ids[:, :-1], ids[:, 1:])
            loss = loss + 0.1 * balance
            (loss / len(mine)).backward()
            total += loss.detach() / MICROS
        clip_gradients(gpt, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        gpt.after_step()
        losses.append(float(context.sum(total)))
    return {"losses": losses, "weights": gpt.state_dict()}


def play(out: Path):
    """What each of the processes does: the curves, then the commands of commands.json."""
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # which compiles what is asked for quickly
    context = setup("cpu", "float64")
    for case in CURVES:
        found = curve(case, context)
        if context.rank == 0:
            torch.save(found, out / f"{context.world}, {case}.pt")
    for script, options, begun in json.loads((out / "commands.json").read_text()):
        if begun and context.rank == 0:
            half_done(Path(begun), Path(options[1 + options.index("--out_dir")]))
        context.barrier()
        sys.argv = [script, *options]
        importlib.import_module(script).main()
    (out / "done").touch()


def half_done(whole: Path, new: Path):
    """A copy of a run as it was before the step that its last evaluation follows."""
    shutil.copytree(whole, new)
    run = only_run(new)
    (run / "result.json").unlink()
    (run / "ckpt.prev.pt").replace(run / "ckpt.pt")


if __name__ == "__main__":
    play(Path(sys.argv[1]))
