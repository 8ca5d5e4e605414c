"""Benchmarks layers and training steps, and checks that the GPU computes the same as the CPU, in three parts.

    python tools/bench.py layer     a sparse layer with each router, next to dense FFNs and Hugging Face's Mixtral
    python tools/bench.py step      training steps of whole models; on a GPU, of the paper's size
    python tools/bench.py check     layers on this device against the CPU's

Contenders run in turns. `ms` is the median time, and `spread` half its interquartile range. `ratio` is the time over
the dense one's, at equal FLOPs (a layer's FLOPs are those of the rows that its experts serve), so 1 means no overhead.
On a GPU, `peak_mb` is the peak memory of a run, beyond what is allocated before it. Results are saved after each
section, to results/gpu/CARD-PART-TYPE.json, or to out/bench without a GPU. Please contribute your GPU's file.
"""

import itertools
import math
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import engine  # isort: skip  # noqa: F401  before torch
import numpy as np
import torch
import tyro
from torch import Tensor, nn

import model
import train_lm
import train_mlm
from engine import parallel
from engine.config import with_constants
from engine.device import Context, clear_errors, setup
from engine.files import write
from engine.optim import adamw, clip_gradients
from engine.table import markdown_table
from metrics import flops, timing
from metrics.routing import RoutingStats
from routers import ROUTERS

ROOT = Path(model.__file__).parent
VOCABULARY = 8192
Contender = tuple[Callable, dict]  # a function to time; facts for its record


@dataclass
class Config:
    part: tyro.conf.Positional[Literal["layer", "step", "check"]]
    tokens: int = 16_384 if torch.cuda.is_available() else 4096  # per forward pass
    rounds: int = 15  # runs of each contender, after one to warm up
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast; check always uses it
    out: Path | None = None  # file for the results


# Contenders share code, but each is compiled for its own shapes, as it would be alone.
@torch._dynamo.config.patch(recompile_limit=100, automatic_dynamic_shapes=False)
def measure(makers: dict, config: Config, context) -> list[dict]:
    """Times all contenders -> a record of each. makers: name -> function that makes one; the first is the baseline."""
    torch.compiler.reset()
    runs, facts, records = {}, {}, []
    for name, make in makers.items():
        try:
            run, facts[name] = make()
            run()
            runs[name] = run
        except Exception as error:  # the library may be missing or changed, or a router refuses the shape's top_k
            if "HF" not in name and type(error) is not ValueError:
                raise
            context.say(f"{name}: skipped ({type(error).__name__}: {error})")
    times = timing.in_turns(runs, context, config.rounds)
    for name, run in runs.items():
        lower, ms, upper = np.quantile(times[name], (0.25, 0.5, 0.75))
        speed = facts[name]["gflops"] / ms  # TFLOP/s
        baseline = records[0]["teraflops"] if records else speed
        record = {"impl": name, "ms": ms, "spread": (upper - lower) / 2, "ratio": baseline / speed}
        records.append(record | {"teraflops": speed} | facts[name] | peak_memory(run, context))
    return records


def peak_memory(run: Callable, context) -> dict:
    """The peak memory of one more run, on a GPU."""
    if context.device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}


# ---------------------------------------------------------------------------------------------------------------------
# layer: how much does it cost?

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
LOGIT_STD = 2.75  # standard deviation of router logits, large enough to prefer experts as a trained router does


def time_layers(shape: train_lm.Config, config: Config, context):
    """Times forward and backward passes of a dense FFN, Mixtral's layer, and our layer with each router.

    Without a capacity limit, topk routes as Mixtral does. At the paper's threshold of 0.9, capacity decides how many
    experts serve a token; at the demo's 0.3, there are one or two.
    """
    torch.manual_seed(0)
    h = torch.randn(1, config.tokens, shape.n_embd).to(context.device)
    ffn = model.FFN(shape, "tanh").to(context.device)
    makers = {"dense": partial(layer, ffn, h, flops.matrix_flops(ffn), context)}
    makers["HF Mixtral, grouped_mm"] = partial(mixtral, shape, h, context)
    for name, changes in VARIANTS.items():
        make = partial(our_layer, replace(shape, **changes), h, context)
        makers[f"ours, {name}"] = make
        if context.dtype == torch.bfloat16 and changes["router"] == shape.router:
            makers[f"ours, {name}, weights in bfloat16"] = partial(make, cast=True)
    return measure(makers, config, context)


def layer(module: nn.Module, h: Tensor, work: float, context, *more: Tensor) -> Contender:
    """A forward and backward pass of module(h, *more), h (1, S, D). work: forward FLOPs per token."""
    forward = parallel.Compiled(module) if h.is_cuda and context.dtype == torch.bfloat16 else module  # as in training

    def run():
        x = h.detach().requires_grad_()
        with context.autocast():
            y = forward(x, *more)
        y = sum(y) if more else y
        y.backward(h.to(y.dtype))  # any gradient of the output will do
        module.zero_grad()  # to None, as in training

    return run, {"gflops": 3e-9 * work * h.shape[1]}


def our_layer(shape: train_lm.Config, h: Tensor, context, cast=False) -> Contender:
    """A sparse layer with random weights. cast: expert weights are stored in bfloat16, too."""
    torch.manual_seed(1)  # not the seed of the tokens
    Shape = with_constants(train_lm.Config, shape.router)
    constants = Shape(**vars(shape) | {"router_std": LOGIT_STD / shape.n_embd**0.5})
    moe = model.xmoe_layer(constants, VOCABULARY, "tanh").to(h.device)
    for p in moe.experts.parameters():
        nn.init.normal_(p, std=0.02)
    if cast:
        moe.experts.to(context.dtype)
    ids = torch.randint(VOCABULARY, h.shape[:2]).to(h.device)
    stats = RoutingStats(moe)
    with torch.no_grad(), context.autocast():
        moe(h, ids)
    rows = stats.finish()["served"]  # per token
    run, facts = layer(moe, h, rows * flops.row_flops(moe), context, ids)
    return run, facts | {"rows_per_token": rows}


def mixtral(shape: train_lm.Config, h: Tensor, context) -> Contender:
    """Hugging Face's layer: top-K, no capacity limit, three matrices that are two thirds as wide as our two."""
    from transformers.models.mixtral import modeling_mixtral

    D, K = shape.n_embd, shape.split
    width = 8 * round(shape.ffn_size / K / 12)
    config = modeling_mixtral.MixtralConfig(hidden_size=D, intermediate_size=width, hidden_act="gelu_pytorch_tanh")
    config.num_local_experts, config.num_experts_per_tok = shape.expert_ffns * K, K
    config._experts_implementation = "grouped_mm"
    block = modeling_mixtral.MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.normal_(block.gate.weight, std=LOGIT_STD / D**0.5)
    block.to(h.device, context.dtype)
    return layer(block, h.to(context.dtype), 6 * D * width * K, context)


# ---------------------------------------------------------------------------------------------------------------------
# step: how fast is training?


def time_steps(preset: str, config: Config, context, **changes):
    """Times XMoE's models at equal FLOPs: dense, with FFN-sized experts (split 1), and with split 8."""
    base = train_lm.Config(**train_lm.PRESETS[preset] | changes)
    makers = {}
    for router, split in {"dense": 1, "switch": 1, "topk": 8, "threshold": 8}.items():
        makers[router] = partial(training_step, replace(base, router=router, split=split), config.tokens, context)
    return measure(makers, config, context)


def training_step(constants: train_lm.Config, tokens: int, context) -> Contender:
    """A training step of at most four micro-batches, each of about this many random tokens."""
    torch.manual_seed(0)
    V = 50_257 if context.device.type == "cuda" else VOCABULARY
    micros = min(constants.batch_tokens // constants.micro_tokens, 4)
    B, T = max(1, tokens // constants.block_size), constants.block_size
    ids = torch.randint(V, (B, T)).to(context.device)
    net = model.GPT(constants, V).to(context.device)
    forward = parallel.Compiled(net) if constants.compile else net
    optimizer = adamw(net, constants)

    def run():
        for _ in range(micros):
            with context.autocast():
                loss, router_loss = forward(ids, ids)
            ((loss + router_loss) / micros).backward()
        clip_gradients(net, constants.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        net.after_step(context.sum)

    tokens = micros * ids.numel()
    work = flops.flops_per_token(net, constants, head=2 * constants.n_embd * V)
    return run, {"tokens": tokens, "gflops": 3e-9 * work * tokens}


# ---------------------------------------------------------------------------------------------------------------------
# check: are the numbers right?

CPU = Context(0, 1, torch.device("cpu"), torch.float32)


def against_the_cpu(router: str, config: Config, context, E=16) -> Iterator[dict]:
    """A bfloat16 layer on this device against fp32 on the CPU. crowded: most tokens request the same experts."""
    for gamma, layers, crowded in itertools.product((2.0, 0.5, 16.0), (0, 2), (False, True)):
        torch.manual_seed(0)
        constants = with_constants(train_mlm.Config, router)(router=router, top_k=2, experts=E, capacity_factor=gamma)
        constants = replace(constants, n_embd=64, expert_size=32, expert_layers=layers)
        moe = model.x_moe_layer(constants, 512, "tanh")
        for p in moe.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.2)
        h = torch.randn(1, 512, 64) + 3 * crowded * torch.randn(64)
        ids = torch.arange(512).unsqueeze(0) % (2 if crowded else 512)
        expected = outcome(moe, (h, ids), CPU)
        first = (gamma, layers, crowded) == (2.0, 0, False)
        compiled = first and context.device.type == "cuda"  # as in training; compiling all takes too long
        actual = outcome(parallel.Compiled(moe) if compiled else moe, (h, ids), context)
        facts = {"gamma": gamma, "stack": layers, "crowded": crowded, "compiled": compiled}
        yield facts | compare(actual, expected, 0.06)  # rounding may send a token with nearly equal scores elsewhere


def outcome(module: nn.Module, inputs: tuple, context) -> dict:
    """The outputs of a module, and the gradients of their sum of squares with respect to inputs and parameters.

    Free memory of the allocator is filled with NaN first, which shows up if uninitialized memory is read.
    """
    torch.manual_seed(0)  # for routers that sample
    module.to(context.device).zero_grad()
    leaves = {}
    for number, x in enumerate(inputs):
        x = x.to(context.device, copy=True)
        leaves[f"input {number}"] = x.requires_grad_(x.is_floating_point())
    if context.device.type == "cuda":
        blocks = [torch.full([size], math.nan, device="cuda") for size in (1 << 27, *64 * [1 << 18])]
        del blocks
    with context.autocast():
        outputs = module(*leaves.values())
    differentiable = [y for y in outputs if torch.is_tensor(y) and y.requires_grad]
    sum(y.float().square().sum() for y in differentiable).backward()
    tensors = {f"output {number}": y for number, y in enumerate(differentiable)}
    leaves |= dict(module.named_parameters())
    for name, x in leaves.items():
        if x.grad is not None:
            tensors[name.removeprefix("compiled._orig_mod.")] = x.grad
    return {name: x.detach().cpu().double() for name, x in tensors.items()}


def compare(actual: dict, expected: dict, limit: float) -> dict:
    """Compares tensors by name: |x - y| / |y| of each must be less than the limit."""
    errors = {name: float(torch.dist(actual[name], y) / (y.norm() + 1e-12)) for name, y in expected.items()}
    wrong = [name for name in errors if not errors[name] < limit]  # NaN is wrong, too
    worst = max(wrong or errors, key=errors.get)
    return {"right": not wrong, "error": errors[worst], "of": worst}


def attention(config: Config, context) -> Iterator[dict]:
    """XLM-E's attention, with padding, against the CPU."""
    torch.manual_seed(0)
    module = model.SelfAttention(train_lm.Config(n_embd=256, n_head=4), causal=False, dropout=0.0, biased=True)
    nn.init.normal_(module.gate)
    lengths = torch.arange(128, 256, 16)
    mask = torch.arange(256) < lengths[:, None, None, None]
    inputs = torch.randn(8, 256, 256), mask, torch.randn(4, 256, 256)
    expected = outcome(module, inputs, CPU)
    yield compare(outcome(module, inputs, context), expected, 0.03)


def sections_of(part: str, gpu: bool) -> dict[str, Callable]:
    if part == "layer":
        names = ["S3", "S4"] if gpu else SHAPES  # small shapes would measure kernel launches
        return {name: partial(time_layers, SHAPES[name]) for name in names}
    if part == "step" and gpu:
        large = partial(time_steps, "openwebtext-323M")
        return {"eager": partial(large, compile=False), "compiled": partial(large, compile=True)}
    if part == "step":
        small = partial(time_steps, "small", dropout=0.0)
        return {"width 256": small, "width 768": partial(small, n_embd=768, ffn_size=3072)}
    checks = {name: partial(against_the_cpu, name) for name in ROUTERS}
    checks["many experts"] = partial(against_the_cpu, "topk", E=1024)  # more groups than CUDA's grouped_mm supports
    return checks | {"attention": attention}


def run(sections: dict, file: Path, config: Config, context) -> list[dict]:
    """Runs each section, then saves and prints its results. An error counts as a result."""
    results = []
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty")
    for name, section in sections.items():
        rows = []
        try:
            rows.extend(section(config, context))
        except Exception as error:
            rows.append({"right": False, "error": repr(error), "traceback": traceback.format_exc().splitlines()})
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
    name = "{device}-{part}-{dtype}.json".format(part=config.part, **context.machine).replace(" ", "-")
    file = config.out or ROOT / ("results/gpu" if gpu else "out/bench") / name
    results = run(sections_of(config.part, gpu), file, config, context)
    wrong = dict.fromkeys(result["section"] for result in results if not result.get("right", True))
    context.say(f"\n{len(results)} results are in {file}; wrong or failed: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
