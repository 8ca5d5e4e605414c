"""How fast this code is, and whether a GPU computes what a CPU does: in three parts, on whatever device there is.

    python tools/bench.py layer     one sparse layer, under every router, beside dense FFNs and Hugging Face's Mixtral
    python tools/bench.py step      training steps of whole models; on a GPU they have the paper's size
    python tools/bench.py check     layers here against the CPU's, and a training that is stopped and goes on

Contenders take turns, round by round. `ms` is the median of one's times, and `spread` half the range between their
quartiles. `ratio` is the time over that of the dense one at equal FLOPs, which for a layer are those of the rows that
its experts really keep: 1 costs nothing but its arithmetic. `least_mb` must be read and written at least; `operations`
take most of the time. On a GPU `peak_mb` is the memory beyond what is kept between runs, and `host_waits` counts, by
file and line, how often the host waits for the GPU. What a section finds is written at once, into
results/gpu/CARD-PART-TYPE.json, or without a GPU into out/bench. A GPU's file is welcome.
"""

import itertools
import math
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are
os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler keeps silent

import engine  # isort: skip  # noqa: F401  before torch
import numpy as np
import torch
import tyro
from torch import Tensor, nn

import model
import train_lm
import train_mlm
from analysis import flops, measures
from engine import parallel
from engine.device import Context, clear_errors, setup
from engine.files import write
from engine.optim import adamw, clip_gradients
from engine.table import markdown_table
from routers import ROUTERS

ROOT = Path(model.__file__).parent
VOCABULARY = 8192
PATIENCE = 5.0  # seconds, after which a slow contender has run often enough
Contender = tuple[Callable, dict]  # does its work once; what its record says that needs no measuring


@dataclass
class Config:
    part: tyro.conf.Positional[Literal["layer", "step", "check"]]
    tokens: int = 16_384 if torch.cuda.is_available() else 4096  # of a forward pass
    rounds: int = 15  # how often each contender runs, after a first time for warming up
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast; check: always
    out: Path | None = None  # file that receives the results


# Contenders are versions of the same code, and each is compiled for its own shapes, as it would be alone.
@torch._dynamo.config.patch(recompile_limit=100, automatic_dynamic_shapes=False)
def measure(makers: dict, config: Config, context) -> list[dict]:
    """A record of each contender. makers: name -> a function that makes one; the first is what others compare with."""
    torch.compiler.reset()
    runs, facts, records = {}, {}, []
    for name, make in makers.items():
        try:
            run, facts[name] = make()
            run()
            runs[name] = run
        except Exception as error:  # there may be no such library, or one that has changed
            if "HF" not in name:
                raise
            context.say(f"{name}: skipped ({type(error).__name__}: {error})")
    times = measures.in_turns(runs, context, config.rounds, PATIENCE)
    for name, run in runs.items():
        lower, ms, upper = np.quantile(times[name], (0.25, 0.5, 0.75))
        speed = facts[name]["gflops"] / ms  # TFLOP/s
        first = records[0]["teraflops"] if records else speed
        spread = (upper - lower) / 2
        record = {"impl": name, "ms": ms, "spread": spread, "ratio": first / speed}
        record |= {"runs": len(times[name]), "teraflops": speed}
        records.append(record | facts[name] | seen(run, context))
    return records


def seen(run: Callable, context) -> dict:
    """What one more run shows: the operations with most of the time; on a GPU also memory, and where the host waits."""
    on_gpu = context.device.type == "cuda"
    set_mode = torch.cuda.set_sync_debug_mode if on_gpu else str
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    watch = warnings.catch_warnings(record=True, action="always")
    with watch as caught, torch.profiler.profile() as profile:
        set_mode("warn")
        run()
        set_mode("default")
        measures.clock(context)  # when the device has done all
    own_time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = Counter()
    for event in profile.key_averages():
        if not on_gpu or event.device_type.name == "CUDA":  # on a GPU its kernels, and not who called them
            name = event.key.removeprefix("aten::").removeprefix("void ")
            name, *_ = name.split("<")  # without a template's arguments
            times[name[:60]] += getattr(event, own_time)
    total = max(1, times.total())
    shares = [f"{name} {own / total:.0%}" for name, own in times.most_common(6)]
    facts = {"operations": ", ".join(shares)}
    if on_gpu:
        waits = [warning for warning in caught if "called a synchroniz" in str(warning.message)]
        facts["host_waits"] = Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits)
        peak = torch.cuda.max_memory_allocated() - before
        facts["peak_mb"] = peak / 2**20
    return facts


# ---------------------------------------------------------------------------------------------------------------------
# layer: what does it cost?

SMALL = dict(n_embd=256, ffn_size=1024)
LARGE = dict(n_embd=768, ffn_size=3072)
SHAPES = {
    "S1": train_lm.Config(**SMALL, router="switch", split=1),  # 8 experts of width 1024
    "S2": train_lm.Config(**SMALL, router="threshold", split=8),  # 64 of 128
    "S3": train_lm.Config(**LARGE, router="topk", split=8),  # 64 of 384
    "S4": train_lm.Config(**LARGE, router="switch", split=1, expert_ffns=32),  # 32 of 3072
}
VARIANTS = {router: {"router": router} for router in ROUTERS if router != "threshold"}
VARIANTS["topk, no limit"] = {"router": "topk", "capacity": math.inf}
VARIANTS["threshold 0.9"] = {"router": "threshold", "threshold": 0.9}
VARIANTS["threshold 0.3"] = {"router": "threshold", "threshold": 0.3}
LOGIT_STD = 2.75  # of what a router says of a token, so that it has preferences as a trained one has


def whole_layers(shape: train_lm.Config, config: Config, context):
    """Forward and backward passes of a dense FFN, of Mixtral's layer, and of ours under every router.

    Without a limit topk chooses as Mixtral does. The threshold is the paper's 0.9, where the limit decides what a token
    keeps, or the demo's 0.3, where that is one or two experts.
    """
    torch.manual_seed(0)
    h = torch.randn(1, config.tokens, shape.n_embd).to(context.device)
    ffn = model.FFN(shape, "tanh").to(context.device)
    makers = {"dense": partial(layer, ffn, h, flops.matrix_flops(ffn), context)}
    makers["HF Mixtral, grouped_mm"] = partial(mixtral, shape, h, context)
    for name, changes in VARIANTS.items():
        own = partial(our_layer, replace(shape, **changes), h, context)
        makers[f"ours, {name}"] = own
        if context.dtype == torch.bfloat16 and changes["router"] == shape.router:
            makers[f"ours, {name}, weights in bfloat16"] = partial(own, cast=True)
    return measure(makers, config, context)


def layer(module: nn.Module, h: Tensor, work: float, context, *more: Tensor) -> Contender:
    """A pass forward and backward: h (1, S, D) and more -> output, balance loss; work: forward FLOPs of a token."""
    as_in_training = h.is_cuda and context.dtype == torch.bfloat16
    forward = parallel.compiled(module) if as_in_training else module

    def run():
        x = h.detach().requires_grad_()
        with context.autocast():
            y = forward(x, *more)
        y = sum(y) if more else y
        y.backward(h.to(y.dtype))  # any gradient will do
        module.zero_grad()  # gradients are made anew, as in training

    # Weights are read twice, and their gradients written; tokens pass in and out, both ways.
    numbers = 3 * flops.numel(module) + 4 * h.numel()
    gflops = 3e-9 * work * h.shape[1]
    return run, {"gflops": gflops, "least_mb": 1e-6 * context.dtype.itemsize * numbers}


def our_layer(shape: train_lm.Config, h: Tensor, context, cast=False) -> Contender:
    """With random weights. cast: those of the experts have the type of the products once and for all."""
    torch.manual_seed(1)  # other than the tokens' seed
    constants = replace(shape, router_std=LOGIT_STD / shape.n_embd**0.5)
    moe = model.xmoe_layer(constants, VOCABULARY, "tanh").to(h.device)
    for p in moe.experts.parameters():
        nn.init.normal_(p, std=0.02)
    if cast:
        moe.experts.to(context.dtype)
    ids = torch.randint(VOCABULARY, h.shape[:2]).to(h.device)
    stats = measures.RoutingStats(moe)
    with torch.no_grad(), context.autocast():
        moe(h, ids)
    rows = stats.finish()["served"]  # per token
    run, facts = layer(moe, h, rows * flops.row_flops(moe), context, ids)
    return run, facts | {"rows_per_token": rows}


def mixtral(shape: train_lm.Config, h: Tensor, context) -> Contender:
    """Hugging Face's: top-K, no capacity, three matrices two thirds as wide as our two, in the type of our products."""
    from transformers.models.mixtral import modeling_mixtral as library

    D, K = shape.n_embd, shape.split
    width = 8 * round(shape.ffn_size / K / 12)
    config = library.MixtralConfig(hidden_size=D, intermediate_size=width, hidden_act="gelu_pytorch_tanh")
    config.num_local_experts, config.num_experts_per_tok = shape.expert_ffns * K, K
    config._experts_implementation = "grouped_mm"
    block = library.MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.normal_(block.gate.weight, std=LOGIT_STD / D**0.5)
    block.to(h.device, context.dtype)
    return layer(block, h.to(context.dtype), 6 * D * width * K, context)


# ---------------------------------------------------------------------------------------------------------------------
# step: how fast does it train?


def training_steps(preset: str, config: Config, context, **changes):
    """XMoE's models, at equal FLOPs: dense, or with whole FFNs as experts, or with eighths of them."""
    base = train_lm.Config(**train_lm.PRESETS[preset] | changes)
    makers = {}
    kinds = {"dense": 1, "switch": 1, "topk": 8, "threshold": 8}
    for router, split in kinds.items():
        constants = replace(base, router=router, split=split)
        makers[router] = partial(trainee, constants, config.tokens, context)
    return measure(makers, config, context)


def trainee(constants: train_lm.Config, tokens: int, context) -> Contender:
    """Training steps of up to four micro-batches, since more take long, each of about so many random tokens."""
    torch.manual_seed(0)
    V = 50_257 if context.device.type == "cuda" else VOCABULARY
    T, micros = constants.block_size, constants.batch_tokens // constants.micro_tokens
    micros = min(micros, 4)
    B = max(1, tokens // T)
    ids = torch.randint(V, (B, T)).to(context.device)
    net = model.GPT(constants, V).to(context.device)
    forward = parallel.compiled(net) if constants.compile else net
    optimizer = adamw(net, constants)

    def run():
        for _ in range(micros):
            with context.autocast():
                loss, balance = forward(ids, ids)
            ((loss + constants.balance_coef * balance) / micros).backward()
        clip_gradients(net, constants.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        net.after_step()

    tokens = micros * ids.numel()
    work = flops.flops_per_token(net, constants, head=2 * constants.n_embd * V)
    return run, {"tokens": tokens, "gflops": 3e-9 * work * tokens}


# ---------------------------------------------------------------------------------------------------------------------
# check: is it right?

CPU = Context(0, 1, torch.device("cpu"), torch.float32)
RESUMED = "--n_layer 2 --n_embd 64 --ffn_size 256 --steps 40 --eval_every 20 --eval_tokens 2048 --dtype bfloat16"


def against_the_cpu(router: str, config: Config, context, E=16) -> Iterator[dict]:
    """A layer here, in bfloat16, against the same on the CPU in float32. crowded: most tokens want the same experts."""
    for gamma, layers, crowded in itertools.product((2.0, 0.5, 16.0), (0, 2), (False, True)):
        torch.manual_seed(0)
        constants = train_mlm.Config(router=router, top_k=2, experts=E, capacity_factor=gamma)
        constants = replace(constants, n_embd=64, expert_size=32, expert_layers=layers)
        moe = model.x_moe_layer(constants, 512, "tanh")
        for p in moe.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.2)
        h = torch.randn(1, 512, 64) + 3 * crowded * torch.randn(64)
        kinds = 2 if crowded else 512
        ids = torch.arange(512).unsqueeze(0) % kinds
        expected = outcome(moe, (h, ids), CPU)
        first = (gamma, layers, crowded) == (2.0, 0, False)
        compiled = first and context.device.type == "cuda"  # as in training; all would take long
        found = outcome(parallel.compiled(moe) if compiled else moe, (h, ids), context)
        facts = {"gamma": gamma, "stack": layers, "crowded": crowded, "compiled": compiled}
        yield facts | judge(found, expected, 0.06)  # a token whose scores are equal but for rounding may go elsewhere


def outcome(module: nn.Module, given: tuple, context) -> dict:
    """What a module makes of given tensors, and gradients of the sum of its squares: by them and by the parameters.

    What the allocator has free is NaN before, so that it shows where memory is read that nobody wrote.
    """
    module.to(context.device).zero_grad()
    leaves, found, loss = {}, {}, 0.0
    for number, x in enumerate(given):
        x = x.to(context.device, copy=True)
        leaves[f"input {number}"] = x.requires_grad_(x.is_floating_point())
    if context.device.type == "cuda":
        sizes = [1 << 27, *64 * [1 << 18]]
        blocks = [torch.full([size], math.nan, device="cuda") for size in sizes]
        del blocks
    with context.autocast():
        outputs = module(*leaves.values())
    for number, y in enumerate(outputs):
        if torch.is_tensor(y) and y.requires_grad:
            found[f"output {number}"] = y
            loss = loss + y.float().square().sum()
    loss.backward()
    leaves |= dict(module.named_parameters())
    for name, x in leaves.items():
        if x.grad is not None:
            found[name.removeprefix("_orig_mod.")] = x.grad
    return {name: x.detach().cpu().double() for name, x in found.items()}


def judge(found: dict, expected: dict, limit: float) -> dict:
    """Compares tensors of the same names: |x - y| / |y| of each must be under the limit."""
    errors = {}
    for name, y in expected.items():
        errors[name] = float(torch.dist(found[name], y) / (y.norm() + 1e-12))
    wrong = [name for name in errors if not errors[name] < limit]  # NaN is wrong, too
    worst = max(wrong or errors, key=errors.get)
    return {"right": not wrong, "error": errors[worst], "of": worst}


def other_parts(config: Config, context) -> Iterator[dict]:
    """XLM-E's attention, in texts of several lengths; a router, compiled as in training, against the eager one here."""
    torch.manual_seed(0)
    constants = train_lm.Config(n_embd=256, n_head=4)
    attention = model.SelfAttention(constants, causal=False, dropout=0.0, biased=True)
    nn.init.normal_(attention.gate)
    lengths = torch.arange(128, 256, 16)
    real = torch.arange(256) < lengths[:, None, None, None]
    given = torch.randn(8, 256, 256), real, torch.randn(4, 256, 256)
    expected = outcome(attention, given, CPU)
    found = outcome(attention, given, context)
    yield {"what": "attention"} | judge(found, expected, 0.03)
    router = ROUTERS["threshold"](constants, E=32)
    h = torch.randn(4096, 256)
    expected = outcome(router, (h,), context)
    found = outcome(parallel.compiled(router), (h,), context)
    yield {"what": "compiled router"} | judge(found, expected, 3e-4)  # gradients in bfloat16 would differ by 2e-3


def stopped_and_resumed(config: Config, context) -> Iterator[dict]:
    """train_lm.py is stopped after its first evaluation, and goes on to its end."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", ROOT / "train_lm.py", *RESUMED.split(), "--out_dir", folder]
        with subprocess.Popen(command, **pipes) as first:
            for line in first.stdout:
                if line.startswith("step 20: "):  # it has been evaluated
                    first.terminate()
        second = subprocess.run(command, **pipes)
    exits = [first.returncode, second.returncode]
    right = exits == [143, 0] and "goes on from step" in second.stdout
    yield {"right": right, "exits": exits, "output": second.stdout[-2000:]}


def sections_of(part: str, gpu: bool) -> dict[str, Callable]:
    if part == "layer":
        names = ["S3", "S4"] if gpu else SHAPES  # small ones would tell how fast a GPU is given its work
        return {name: partial(whole_layers, SHAPES[name]) for name in names}
    if part == "step" and gpu:
        large = partial(training_steps, "openwebtext-323M")
        return {"eager": partial(large, compile=False), "compiled": partial(large, compile=True)}
    if part == "step":
        small = partial(training_steps, "small", dropout=0.0)
        return {"width 256": small, "width 768": partial(small, n_embd=768, ffn_size=3072)}
    found = {name: partial(against_the_cpu, name) for name in ROUTERS}
    found["many experts"] = partial(against_the_cpu, "topk", E=1024)  # CUDA's grouped_mm takes fewer groups than that
    return found | {"other parts": other_parts, "train_lm.py": stopped_and_resumed}


def run(sections: dict, file: Path, config: Config, context) -> list[dict]:
    """Writes and prints what each section finds, as soon as it has. An error is a result, too."""
    results = []
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty")
    for name, section in sections.items():
        rows = []
        try:
            rows.extend(section(config, context))
        except Exception as error:
            trace = traceback.format_exc().splitlines()
            rows.append({"right": False, "error": repr(error), "traceback": trace})
        results += [{"section": name} | row for row in rows]
        write(file, {"machine": context.machine | {"commit": commit}, "results": results})
        columns = [*rows[-1]]
        cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
        context.say(f"\n{name}\n{markdown_table(columns, cells)}")
    return results


def cell(value) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value!s:.80}"


def main():
    config = tyro.cli(Config, description=__doc__, use_underscores=True)
    with clear_errors():
        context = setup(dtype="bfloat16" if config.part == "check" else config.dtype)
    gpu = context.device.type == "cuda"
    device, dtype = context.machine["device"].replace(" ", "-"), context.machine["dtype"]
    folder = ROOT / ("results/gpu" if gpu else "out/bench")
    file = config.out or folder / f"{device}-{config.part}-{dtype}.json"
    results = run(sections_of(config.part, gpu), file, config, context)
    wrong = dict.fromkeys(result["section"] for result in results if not result.get("right", True))
    context.say(f"\n{len(results)} results are in {file}; wrong or failed: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
