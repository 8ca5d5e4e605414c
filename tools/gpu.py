"""What a CUDA card makes of this code, in three parts of at most ten minutes each.

    python tools/gpu.py check     whether it computes the right thing, and where the host waits for the card
    python tools/gpu.py layer     one sparse layer, whole and in pieces, beside dense ones and other people's
    python tools/gpu.py step      training steps of the papers' models, and a training that is stopped and goes on

Each result is printed, and written at once into results/gpu/CARD-PART.json (or --out FILE), so that a stop loses
nothing; after --limit seconds nothing new begins. The file is welcome in an issue, whatever it says: this code has
seen few cards. `least_ms` beside a time is what the card needs at its best: for the FLOPs at its peak, or for the bytes
at the speed of a copy. Without a card this is a rehearsal, at toy sizes on the CPU, and its times mean nothing.
"""

import functools
import itertools
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the project's modules are

import train_lm
from analysis.measures import clock
from data.prepare import prepare
from data.tokenizers import train_sentencepiece
from engine import parallel
from engine.device import Context
from engine.files import write
from engine.optim import cross_entropy, in_fp32
from model import (
    Experts,
    MoE,
    Stacks,
    activation,
    add_rows,
    biased_attention,
    kept_rows,
    ragged_linear,
    within_capacity,
)
from routers import ROUTERS
from tools import bench

ROOT = Path(bench.__file__).parents[1]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HERE = Context(0, 1, DEVICE, torch.bfloat16)
S = 16 * 1024 if CUDA else 256  # tokens of a micro-batch
SIDE = 8192 if CUDA else 64  # of matrices that are large for this device
TURNS = bench.Config("layer", rounds=12 if CUDA else 1)
TOY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "ffn_size": 128}
TOY |= {"block_size": 64, "batch_tokens": 2 * S, "micro_tokens": S}
Results = Iterator[dict]  # of a section, each with the names of its numbers


def preset(name: str, **changes) -> train_lm.Config:
    constants = train_lm.PRESETS[name] | ({} if CUDA else TOY)
    return train_lm.Config(**constants | changes)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def milliseconds(run: Callable) -> float:
    run()  # what is compiled is compiled now
    timer = Timer("run()", globals={"run": run})
    least = 0.2 if CUDA else 1e-4  # seconds
    return 1e3 * timer.blocked_autorange(min_run_time=least).median


# ---------------------------------------------------------------------------------------------------------------------
# check: is it right?


def values_and_gradients(way: Callable, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a way of computing gives, as y, and the gradients of what it is given. way() -> y, balance loss."""
    y, balance = way()
    loss = y.float().square().sum() + balance
    gradients = torch.autograd.grad(loss, [*given.values()], allow_unused=True)
    found = {"y": y} | dict(zip(given, gradients))
    return {name: x for name, x in found.items() if x is not None}


def judge(found: dict, expected: dict, limit: float) -> dict:
    """Compares tensors of the same names: |x - y| / |y| of each must be under the limit."""
    errors = {}
    for name in expected:
        x = found[name].detach().cpu().double()
        y = expected[name].detach().cpu().double()
        error = torch.dist(x, y) / (y.norm() + 1e-12)
        errors[name] = float(error)
    wrong = [name for name in errors if not errors[name] < limit]  # NaN is wrong, too
    worst = max(wrong or errors, key=errors.get)
    return {"right": not wrong, "error": errors[worst], "of": worst}


CASES = {  # capacity factor, FFNs of a stack
    "roomy": (2.0, 0),
    "tight": (0.5, 0),
    "no limit": (math.inf, 0),
    "stacks": (math.inf, 2),
}


def against_the_cpu(router: str, E: int = 16) -> Results:
    """A layer here, in bfloat16, against the same on the CPU in float32: what it gives, and its gradients.

    Crowded: nearly all tokens want the same two experts, and others stay empty, where the router lets them.
    """
    tokens, D = S // 32, 64
    for case, crowded in itertools.product(CASES, (False, True)):
        gamma, layers = CASES[case]
        torch.manual_seed(0)
        constants = train_lm.Config(n_embd=D)
        chooser = ROUTERS[router](constants, E, 2, tokens, layers > 0)
        size = E, D, 32, "tanh"
        moe = MoE(chooser, Stacks(*size, layers) if layers else Experts(*size), gamma, gamma)
        for p in moe.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.2)
        h = torch.randn(1, tokens, D)
        ids = torch.arange(tokens).unsqueeze(0)
        if crowded:
            h, ids = h + 0.5, ids % 2
        if crowded and hasattr(chooser, "experts"):  # they stand against what all tokens share
            chooser.experts.data[2:] -= 0.5 * chooser.project(torch.ones(D)).detach()
        expected, theirs = forward_and_back(moe, h, ids, "cpu", nullcontext())
        found, ours = forward_and_back(moe, h, ids, DEVICE, HERE.autocast())
        same = torch.equal(ours, theirs)  # scores that are equal but for rounding may change places
        facts = {"experts": case, "crowded": crowded, "same choices": same}
        yield facts | judge(found, expected, 0.03 if same else 0.3)


def forward_and_back(moe: MoE, h, ids, device, autocast) -> tuple[dict, Tensor]:
    """The output and all gradients, and which tokens are kept."""
    moe.to(device)
    h = h.to(device, copy=True).requires_grad_()
    choices = []
    moe.watchers = [lambda moe, h, routing, kept: choices.append(kept.cpu())]

    def way():
        with autocast:
            return moe(h, ids.to(device))

    poison()
    found = values_and_gradients(way, {"h": h} | dict(moe.named_parameters()))
    return found, choices[0]


def poison():
    """Fills with NaN what the allocator has free, so that it shows where memory is read that nobody wrote."""
    sizes = [1 << 27, *64 * [1 << 18]] if CUDA else []
    blocks = [torch.full([size], math.nan, device=DEVICE) for size in sizes]
    del blocks


def attention() -> Results:
    """XLM-E's, forward and backward, against float32."""
    B, H, T, d = 2, 2, 32, 16
    if CUDA:
        B, H, T, d = 32, 12, 512, 64
    torch.manual_seed(0)
    inputs = {name: random(B, H, T, d) for name in "qkv"}
    inputs["scale"] = random(B, H, T).float()
    inputs["distance"] = random(H, T, T).float()
    lengths = T - torch.arange(B) % (T // 2)
    real = torch.arange(T) < lengths.view(B, 1, 1, 1)

    def once(device, dtype=None) -> dict:
        mask = real.to(device)
        leaves = {name: x.to(device, dtype, copy=True) for name, x in inputs.items()}
        for x in leaves.values():
            x.requires_grad_()
        return values_and_gradients(lambda: (biased_attention(**leaves, mask=mask), 0), leaves)

    again = partial(once, DEVICE)
    facts = judge(again(), once("cpu", torch.float32), 0.03) | {"ms": milliseconds(again)}
    yield facts | {"peak_mb": bench.peak_memory(again, HERE)}


def compiled_router() -> Results:
    """Its gradient, compiled as in training, against the eager one: both in float32, whatever is around them."""
    torch.manual_seed(0)
    constants = preset("demo", compile=True)
    router = ROUTERS["threshold"](constants, E=32).to(DEVICE)
    h = torch.randn(S, constants.n_embd).to(DEVICE)

    def gradient(forward) -> dict[str, Tensor]:
        def way():
            with HERE.autocast():
                routing = forward(h)
            return routing.weight, routing.balance_loss

        found = values_and_gradients(way, {"experts": router.experts})
        return {"experts": found["experts"]}

    compiled = gradient(parallel.wrap(router, constants, HERE))
    yield judge(compiled, gradient(router), 3e-4)  # bfloat16 would differ by 2e-3


def host_waits(router: str) -> Results:
    """Where in a training step the host waits for the card, and how often."""
    constants = preset("small", router=router, n_layer=2, compile=False)
    trainee = bench.trainee(constants, S // 4, HERE)
    trainee.run()
    waits = Counter()

    def note(message, *rest):
        if "called a synchroniz" in str(message):
            *_, caller, _ = project_lines(traceback.extract_stack())  # the last is this function
            waits[caller] += 1

    set_mode = torch.cuda.set_sync_debug_mode if CUDA else str
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        set_mode("warn")
        trainee.run()
        set_mode("default")
    yield {"waits": dict(waits)}


def project_lines(stack) -> Iterator[str]:
    """The lines of a stack that are the project's, and in which functions; the innermost is the last."""
    for frame in stack:
        file = Path(frame.filename)
        if file.is_relative_to(ROOT) and "site-packages" not in file.parts:
            yield f"{file.relative_to(ROOT)}:{frame.lineno} {frame.name}"


CHECK = {f"router {name}": partial(against_the_cpu, name) for name in ROUTERS}
CHECK["many experts"] = partial(against_the_cpu, "topk", E=1024)  # CUDA's grouped_mm takes fewer groups than that
CHECK |= {"attention": attention, "compiled router": compiled_router}
CHECK |= {f"host waits, {name}": partial(host_waits, name) for name in ["dense", *ROUTERS]}

# ---------------------------------------------------------------------------------------------------------------------
# layer: where does the time go?

SHAPES = {
    "XMoE 32 x 768": preset("openwebtext-323M", split=4),
    "XMoE 64 x 384": preset("openwebtext-323M", split=8),
    "Switch 8 x 3072": preset("openwebtext-323M", split=1, router="switch"),
}


def least_ms(flops: float, moved: float) -> float:
    """moved: bytes, read and written"""
    peak = HERE.peak_flops or product_speed(SIDE, SIDE, SIDE)
    return 1e3 * max(flops / peak, moved / copy_speed())


@functools.cache
def copy_speed() -> float:
    """Bytes a second, read and written."""
    numbers = random(1 << (29 if CUDA else 19))
    copy = torch.empty_like(numbers)
    ms = milliseconds(lambda: copy.copy_(numbers))
    return 2e3 * numbers.nbytes / ms


@functools.cache
def product_speed(M: int, K: int, N: int) -> float:
    """FLOP/s of (M, K) by the transpose of (N, K), as nn.Linear has it."""
    x, w = random(M, K), random(N, K)
    ms = milliseconds(lambda: x @ w.t())
    return 2e3 * M * K * N / ms


def ceilings() -> Results:
    """What the card reaches; also in products that make logits, of GPT-2's vocabulary and of a multiple of 64."""
    yield {"data sheet, FLOP/s": HERE.peak_flops}
    yield {"copy, bytes/s": copy_speed()}
    yield {"large product, FLOP/s": product_speed(SIDE, SIDE, SIDE)}
    for V in (50_257, 50_304):
        yield {"vocabulary": V, "FLOP/s": product_speed(S, 768, V)}


def whole_layers(shape: train_lm.Config) -> Results:
    """Forward and backward: dense layers, ours under every router and compiled, Mixtral's, MegaBlocks'."""
    h = random(1, S, shape.n_embd).float()
    peers = {
        "HF Mixtral, grouped_mm": partial(bench.mixtral, shape, h, HERE),
        "ours, compiled": partial(bench.our_layer, shape, h, HERE, compiled=True),
        "MegaBlocks": partial(megablocks, shape, h),
    }
    for record in bench.measure_layers("", shape, h, peers, TURNS, HERE):
        facts = {name: record[name] for name in "impl ms spread ratio to_compiled peak_mb".split()}
        facts["least_ms"] = least_ms(1e9 * record["gflops"], 1e6 * record["least_mb"])
        yield facts


def megablocks(shape: train_lm.Config, h: Tensor) -> bench.Contender:
    """Top-K without a capacity."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    D, K = shape.n_embd, shape.split
    types = {"fp16": False, "bf16": True}
    arguments = Arguments(hidden_size=D, ffn_hidden_size=shape.ffn_size // K, **types)
    arguments.moe_num_experts, arguments.moe_top_k = shape.expert_ffns * K, K
    arguments.bias = arguments.return_bias = False
    arguments.moe_loss_weight, arguments.mlp_impl = 0, "grouped"
    block = dMoE(arguments)
    nn.init.normal_(block.router.layer.weight, std=bench.LOGIT_STD / D**0.5)
    gflops = 4e-9 * D * shape.ffn_size * S
    return bench.layer(block, bench.alone(block), h.bfloat16(), gflops, HERE)


def pieces() -> Results:
    """XMoE's layer of 32 experts, step by step, and the loss behind the model."""
    moe = bench.sparse_ffn(SHAPES["XMoE 32 x 768"]).to(DEVICE)
    E, width, D = moe.experts.w_in.shape
    C = moe.capacity(S)
    N = E * C
    h = random(S, D).float()
    with torch.no_grad():
        routing = moe.router(h)
        kept = within_capacity(routing.priority, C)
        gates = routing.weight * kept
        rows = kept_rows(gates, kept, N)
    used = int(kept.sum())
    yield {"rows": N, "kept": used, "tokens": S}

    x, a, w = random(N, D), random(N, width), random(E, width, D)
    hidden = a, a.float(), rows.gate  # products, biases (any will do), gates
    work = 2 * used * D * width  # FLOPs of each product
    product = partial(ragged_linear, rows=rows)
    compiled = torch.compile(activation)
    yield piece("router", lambda h: moe.router(h).weight, h, flops=2 * S * D * E)
    yield piece("capacity", partial(within_capacity, capacity=C), routing.priority)
    yield piece("list of rows", partial(kept_rows, kept=kept, room=N), gates)
    yield piece("gather", partial(Tensor.index_select, dim=0, index=rows.token), h.bfloat16())
    yield piece("product in", product, x, w.mT, flops=work)
    yield piece("activation", partial(activation, gelu="tanh"), *hidden)
    yield piece("activation, compiled", partial(compiled, gelu="tanh"), *hidden)
    yield piece("product out", product, a, w, flops=work)
    yield piece("scatter", partial(add_rows, torch.zeros_like(h), rows), x)
    V = 50_257 if CUDA else 257
    logits, targets = random(S, V), torch.arange(S).to(DEVICE) % V
    yield piece("loss, as the scripts have it", cross_entropy, logits, targets)
    yield piece("loss, not compiled", in_fp32, logits, targets)


def piece(name: str, step: Callable, *inputs: Tensor, flops: float = 0) -> dict:
    """Times of a forward pass, and of a backward one where there is one. At least inputs and outputs are moved."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = step(*leaves)
    outputs = y if isinstance(y, tuple) else (y,)
    moved = sum(x.nbytes for x in (*inputs, *outputs) if x is not None)
    facts = {"piece": name, "forward_ms": milliseconds(partial(step, *inputs))}
    facts["least_ms"] = least_ms(flops, moved)
    if isinstance(y, Tensor) and y.requires_grad:
        moving = [x for x in leaves if x.requires_grad]
        gradients = torch.ones_like(y)
        back = partial(torch.autograd.grad, y, moving, gradients, retain_graph=True)
        facts["backward_ms"] = milliseconds(back)
        facts["least_backward_ms"] = least_ms(2 * flops, 2 * moved)
    facts["peak_mb"] = bench.peak_memory(partial(step, *leaves), HERE)
    return facts


LAYER = {"ceilings": ceilings}
LAYER |= {name: partial(whole_layers, shape) for name, shape in SHAPES.items()}
LAYER |= {"pieces": pieces}

# ---------------------------------------------------------------------------------------------------------------------
# step: how fast does it train?


def training_steps(constants: train_lm.Config) -> Results:
    """Whole steps: all micro-batches, clipping, AdamW."""
    micros = constants.batch_tokens // constants.micro_tokens
    trainee = bench.trainee(constants, S, HERE, micros)
    start = clock(HERE)
    trainee.run()
    first = 1e-3 * (clock(HERE) - start)
    (record,) = bench.measure("", {"": trainee}, TURNS, HERE)
    flops, seconds = 1e9 * record["gflops"], 1e-3 * record["ms"]
    peak = HERE.peak_flops
    yield {
        "steps_per_second": 1 / seconds,
        "tokens_per_second": record["S"] / seconds,
        "ms": record["ms"],
        "least_ms": least_ms(flops, 0),
        "mfu": flops / seconds / peak if peak else None,
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20 if CUDA else None,
        "first step, seconds": first,
    }


def stopped_and_resumed() -> Results:
    """train_lm.py is stopped after its first evaluation, and goes on to its end."""
    size = "--preset small" if CUDA else "--n_layer 2 --n_embd 32 --ffn_size 64 --block_size 32"
    words = f"{size} --device {DEVICE.type} --dtype bfloat16 --steps 60 --eval_every 20 --eval_tokens 2048"
    with tempfile.TemporaryDirectory() as base:
        pages = [file.read_text() for file in ROOT.glob("*/*.py")]
        text = Path(base, "text.txt")
        text.write_text("\n\n".join(pages))
        tokenizer = train_sentencepiece(pages, 400).save(Path(base))
        data = prepare("text", text, tokenizer, out=Path(base, "text"))
        command = [sys.executable, "-u", ROOT / "train_lm.py", *words.split()]
        command += ["--data", data, "--out_dir", f"{base}/runs"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first = subprocess.Popen(command, **pipes)
        for line in first.stdout:
            if line.startswith("step 20: "):  # it has been evaluated
                first.send_signal(signal.SIGTERM)
                break
        first.communicate()
        second = subprocess.run(command, **pipes)
    exits = [first.returncode, second.returncode]
    right = exits == [143, 0] and "goes on from step" in second.stdout
    output = "" if right else second.stdout[-3000:]
    yield {"right": right, "exits": exits, "output": output}


MODELS = {"124M dense": "openwebtext-124M", "323M threshold": "openwebtext-323M"}
STEP = {"train_lm.py": stopped_and_resumed}
for title, name in MODELS.items():
    STEP[f"{title}, eager"] = partial(training_steps, preset(name, compile=False))
    STEP[f"{title}, compiled"] = partial(training_steps, preset(name, compile=True))

# ---------------------------------------------------------------------------------------------------------------------

PARTS = {"check": CHECK, "layer": LAYER, "step": STEP}


@dataclass
class Config:
    part: tyro.conf.Positional[Literal["check", "layer", "step"]]
    limit: float = 540.0  # seconds, after which nothing new begins
    out: Path | None = None  # file of the results; None: results/gpu/CARD-PART.json, without a card in out/gpu/


def run(sections: dict[str, Callable[[], Results]], file: Path, head: dict, limit: float) -> list[dict]:
    """Prints and writes what each section yields, until time is up. An error is a result, too."""
    start, results = time.perf_counter(), []

    def add(section: str, facts: dict):
        seconds = round(time.perf_counter() - start, 1)
        results.append({"section": section, "at_seconds": seconds} | facts)
        write(file, head | {"results": results})
        words = []
        for name, value in facts.items():
            words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        print(f"{seconds:6.1f} s  {section}: {', '.join(words):.300}", flush=True)

    for name, section in sections.items():
        try:
            for facts in section():
                add(name, facts)
                if time.perf_counter() - start > limit:
                    add(name, {"stopped": "time is up"})
                    return results
        except Exception as error:
            facts = {"right": False, "error": repr(error)}
            add(name, facts | {"traceback": traceback.format_exc()})
    return results


def main():
    config = tyro.cli(Config, description=__doc__)
    card = torch.cuda.get_device_name() if CUDA else "cpu"
    folder = ROOT / ("results/gpu" if CUDA else "out/gpu")
    file = config.out or folder / f"{re.sub('[^A-Za-z0-9]+', '-', card)}-{config.part}.json"
    head = {"part": config.part, "machine": HERE.machine | {"cuda": torch.version.cuda}}
    head["commit"] = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty")
    with nullcontext() if CUDA else torch.compiler.set_stance("force_eager"):  # a rehearsal compiles nothing
        results = run(PARTS[config.part], file, head, config.limit)
    wrong = [result["section"] for result in results if not result.get("right", True)]
    print(f"{len(results)} results are in {file}; wrong or failed: {', '.join(dict.fromkeys(wrong)) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
