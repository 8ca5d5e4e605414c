"""How fast a sparse layer, whole training steps and several processes are, each beside what it should be compared with.

    python tools/bench.py layer                          one layer beside dense FFNs and Hugging Face's
    python tools/bench.py step                           training steps of the scripts' models, at equal FLOPs
    torchrun --nproc_per_node 4 tools/bench.py scale     what it costs that processes share a training step
    python tools/bench.py layer --device cuda --tokens 65536 --json layer.json

All contenders take turns, round by round. Times are medians in milliseconds, and `spread` is half the range between
their quartiles. The `ratio` of a layer, router included, is its time over that of a dense FFN with the FLOPs of the
rows that the experts really keep: 1 is a layer that costs nothing but its arithmetic. `to_compiled` compares with a
dense FFN whose GELU is compiled, as that of our experts is. `python tools/bench.py layer --help` lists the options.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are

import model
import train_lm
from analysis import flops, measures
from engine import parallel
from engine.config import check, parse
from engine.device import clear_errors, machine, peak_flops, setup
from engine.optim import adamw, cross_entropy
from engine.table import cell, markdown_table
from routers import ROUTERS

VOCABULARY = 8192


@dataclass
class Config:
    tokens: int = 4096  # of the layer's input, or of a training step
    rounds: int = 15  # how often each contender runs, behind a first time for warming up
    patience: float = 5.0  # seconds, behind which a slow contender has run often enough
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast
    json: str | None = None  # file that receives the records


class Contender(NamedTuple):
    run: Callable[[], None]  # does the work once
    facts: dict  # what its record says that needs no measuring


def measure(group: str, contenders: dict[str, Contender], config: Config, context) -> list[dict]:
    """A record of each: its facts, the median of its times and their spread, and the memory that it needs.

    The first round warms up and does not count. Every other round goes backwards, so that nobody always follows the
    same neighbour. A contender drops out when its times add up to the patience. The slowest process counts.
    """
    times = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(1 + config.rounds):
        for name in order:
            if sum(times[name]) > 1e3 * config.patience:
                continue
            context.barrier()
            start = clock(context)
            contenders[name].run()
            slowest = max(context.gather(clock(context) - start))
            if turn > 0:
                times[name].append(slowest)
        order.reverse()
    records = []
    for name, found in times.items():
        record = {"shape": group, "impl": name, "runs": len(found)} | contenders[name].facts
        first, middle, third = statistics.quantiles(found * 2 if len(found) == 1 else found, method="inclusive")
        record |= {"ms": middle, "all_ms": found, "spread": (third - first) / 2}
        record["peak_mb"] = peak_memory(contenders[name]) if context.device.type == "cuda" else None
        records.append(record)
    return records


def clock(context) -> float:
    """Milliseconds, read when the device has done all that it was asked for."""
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


def peak_memory(contender: Contender) -> float:
    """The MB on a GPU that a run needs at its peak beyond what is there before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender.run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def show(records: list[dict], columns: str, title: str, context):
    rows = []
    for record in records:
        rows.append([cell(record[column]) for column in columns.split()])
    context.say(f"\n{title}\n\n{markdown_table(columns.split(), rows)}")


# ---------------------------------------------------------------------------------------------------------------------
# One layer


class Shape(NamedTuple):
    D: int  # model width
    E: int  # experts
    F: int  # inner width of one
    router: str
    K: int  # experts per token, of a router that takes a fixed number
    gamma: float  # capacity factor


SHAPES = {
    "S1": Shape(256, 8, 1024, "switch", 1, 1.0),
    "S2": Shape(256, 64, 128, "threshold", 8, 8.0),
    "S3": Shape(768, 64, 384, "topk", 8, 8.0),
    "S4": Shape(768, 32, 3072, "switch", 1, 1.0),
}
LOGIT_STD = 2.75  # of what a router says of a token, so that it has preferences as a trained one has


@dataclass
class LayerConfig(Config):
    shapes: tuple[Literal["S1", "S2", "S3", "S4"], ...] = tuple(SHAPES)  # some of these


def bench_layer(config: LayerConfig, context) -> list[dict]:
    """Forward and backward pass of one layer: dense FFNs of its FLOPs; ours, under its router and others; Mixtral's."""
    records = []
    for name in config.shapes:
        shape = SHAPES[name]
        torch.manual_seed(0)
        h = torch.randn(1, config.tokens, shape.D, device=context.device)
        ours = our_layer(shape, h, context)
        layers = dense_layers(h, ours.facts["gflops"], context) | {"ours": ours}
        for router in ROUTERS:
            if router != shape.router:
                layers[f"ours, {router}"] = our_layer(shape._replace(router=router), h, context)
        no_limit = shape._replace(router="topk", gamma=math.inf)  # it chooses as Mixtral does
        layers["ours, no limit"] = our_layer(no_limit, h, context)
        for peer, implementation in PEERS.items():
            try:
                layers[peer] = hf_mixtral(implementation, shape, h, context)
            except Exception as error:  # it is not installed, or fails in one of many ways
                context.say(f"{peer}: skipped ({type(error).__name__}: {error})")
        found = measure(name, layers, config, context)
        for record in found:
            cost = record["ms"] / record["gflops"]
            record["ratio"] = cost * found[0]["gflops"] / found[0]["ms"]
            record["to_compiled"] = cost * found[1]["gflops"] / found[1]["ms"]
        columns = "impl runs ms spread ratio to_compiled peak_mb gflops"
        show(found, columns, f"{name}: {config.tokens} tokens, {shape}", context)
        records += found
    return records


def layer(module: nn.Module, call: Callable, h: Tensor, gflops: float, context) -> Contender:
    """A forward and a backward pass of call: (1, S, D) -> output, balance loss. gflops: of the forward pass."""

    def run():
        x = h.detach().requires_grad_()
        with context.autocast():
            y, balance = call(x)
        loss = y + balance
        loss.backward(h.to(y.dtype))  # any gradient will do
        module.zero_grad(set_to_none=True)  # gradients are made anew, as in training

    return Contender(run, {"S": h.shape[1], "gflops": 3 * gflops})


def our_layer(shape: Shape, h: Tensor, context) -> Contender:
    """model.MoE under any router, with random weights."""
    torch.manual_seed(0)
    constants = train_lm.Config(n_embd=shape.D, router_std=LOGIT_STD / math.sqrt(shape.D))
    router = ROUTERS[shape.router](constants, shape.E, shape.K, VOCABULARY)
    moe = model.MoE(router, shape.D, shape.F, "tanh", shape.gamma, shape.gamma)
    for p in moe.experts.parameters():
        nn.init.normal_(p, std=0.02)
    moe.to(h.device)
    ids = torch.randint(VOCABULARY, h.shape[:2], device=h.device)
    stats = measures.RoutingStats(moe)
    with torch.no_grad():
        moe(h, ids)
    rows = stats.finish()["served"]  # per token
    ours = layer(moe, lambda x: moe(x, ids), h, 4e-9 * shape.D * shape.F * rows * h.shape[1], context)
    ours.facts.update(E=shape.E, F=shape.F, rows_per_token=rows)
    return ours


def dense_layers(h: Tensor, gflops: float, context) -> dict[str, Contender]:
    """An FFN of width 4 D on as many of the tokens as make these FLOPs, with torch's GELU and with our experts'."""
    D = h.shape[2]
    gate = torch.ones((), device=h.device)
    ffn = model.FFN(train_lm.Config(n_embd=D, ffn_size=4 * D), "tanh").to(h.device)
    each = 16e-9 * D**2  # GFLOPs of a token, forward
    S = max(1, round(gflops / 3 / each))
    h = h.narrow(1, 0, S)

    def compiled(x: Tensor) -> tuple[Tensor, float]:
        a = F.linear(x, ffn.fc.weight)
        large = a.numel() >= model.WORTH_COMPILING
        activate = model.compiled_activation(a.device.type) if large else model.activation
        return ffn.proj(activate(a, ffn.fc.bias, gate, "tanh")), 0.0

    return {
        "dense": layer(ffn, lambda x: (ffn(x), 0.0), h, S * each, context),
        "dense, compiled GELU": layer(ffn, compiled, h, S * each, context),
    }


def hf_mixtral(implementation: str, shape: Shape, h: Tensor, context) -> Contender:
    """Hugging Face's Mixtral block: top-K without a capacity.

    Its experts have three matrices, and are two thirds as wide as ours, so that FLOPs and parameters are equal. Its
    weights have the type of our products, since autocast does not reach all of its own.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    width = 8 * round(shape.F / 12)
    config = MixtralConfig(hidden_size=shape.D, intermediate_size=width, hidden_act="gelu_pytorch_tanh")
    config.num_local_experts, config.num_experts_per_tok = shape.E, shape.K
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.normal_(block.gate.weight, std=LOGIT_STD / math.sqrt(shape.D))
    block.to(h.device, context.dtype)
    gflops = 6e-9 * shape.D * width * shape.K * h.shape[1]
    return layer(block, lambda x: (block(x), 0.0), h.to(context.dtype), gflops, context)


PEERS = {"HF Mixtral, loop": "eager", "HF Mixtral, grouped_mm": "grouped_mm"}

# ---------------------------------------------------------------------------------------------------------------------
# Training steps


def decoders(preset: str, **changes) -> dict[str, train_lm.Config]:
    """XMoE's models: experts in every second block, as wide as the dense FFN or an eighth of it."""
    base = train_lm.Config(**train_lm.PRESETS[preset] | {"dropout": 0.0} | changes)
    ffn = base.ffn_size
    return {
        f"dense 1 x {ffn}": replace(base, router="dense"),
        f"switch 8 x {ffn}": replace(base, router="switch"),
        f"topk 64 x {ffn // 8}": replace(base, router="topk", split=8),
        f"threshold 64 x {ffn // 8}": replace(base, router="threshold", split=8),
    }


STEPS = {  # device: title of a group -> its models
    "cpu": {"width 256": decoders("small"), "width 768": decoders("small", n_embd=768, ffn_size=3072)},
    "cuda": {"width 768": decoders("openwebtext-323M", compile=True)},
}


def bench_step(config: Config, context) -> list[dict]:
    """Forward, backward, clipping and AdamW on random tokens."""
    records, fastest = [], peak_flops(context)
    for group, models in STEPS["cuda" if context.device.type == "cuda" else "cpu"].items():
        trainees = {name: trainee(constants, config.tokens, context) for name, constants in models.items()}
        found = measure(group, trainees, config, context)
        dense, switch, *_ = found
        for record in found:
            seconds = record["ms"] / 1e3
            record["tokens_per_second"] = record["S"] / seconds
            record["mfu"] = 1e9 * record["gflops"] / seconds / fastest if fastest else None
            record["to_dense"] = record["ms"] / dense["ms"]
            record["to_switch"] = record["ms"] / switch["ms"]
        columns = "impl runs ms spread tokens_per_second mfu peak_mb to_dense to_switch"
        show(found, columns, f"{group}: steps of {dense['S']} tokens", context)
        records += found
    return records


def trainee(config: train_lm.Config, tokens: int, context, micros: int = 1, alone: bool = False) -> Contender:
    """Training steps of so many micro-batches of about so many random tokens. alone: it waits for no other process."""
    torch.manual_seed(0)
    V = 50_257 if context.device.type == "cuda" else VOCABULARY
    ids = torch.randint(V, (max(1, tokens // config.block_size), config.block_size), device=context.device)
    config = replace(config, micro_tokens=ids.numel())
    net = model.GPT(config, V).to(context.device)
    work = flops.flops_per_token(net, config, head=2 * config.n_embd * V)["total"]
    forward = net if alone else parallel.wrap(net, config, context)
    optimizer = adamw(net, config)

    def run():
        for micro in range(micros):
            forward.require_backward_grad_sync = micro == micros - 1  # processes exchange gradients once
            with context.autocast():
                logits, balance = forward(ids)
                loss = cross_entropy(logits.flatten(0, 1), ids.flatten())
            ((loss + config.balance_coef * balance) / micros).backward()
        parallel.clip_grad_norm_(net, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        net.after_step()

    held = sum(parallel.local(p).numel() for p in net.parameters())
    S = micros * ids.numel()
    # State: weights, gradients and Adam's two moments, in fp32.
    return Contender(run, {"S": S, "gflops": 3e-9 * S * work, "state_mb": 16 * held / 2**20})


# ---------------------------------------------------------------------------------------------------------------------
# Several processes

MICROS = 4  # micro-batches of a step, which the processes share out


def bench_scale(config: Config, context) -> list[dict]:
    """Training steps that the processes of torchrun share, beside those of one process while the others wait.

    `communication` is the share of a step that the same processes save where none waits for another; `state_mb` are
    the weights, gradients and moments of each.
    """
    world = context.world
    if MICROS % world:
        raise ValueError(f"{world} processes cannot share out {MICROS} micro-batches evenly")
    preset = "openwebtext-323M" if context.device.type == "cuda" else "small"
    *_, base = decoders(preset).values()
    step = partial(trainee, tokens=config.tokens // MICROS, context=context)
    ways = {"one process": step(base, micros=0 if context.rank else MICROS, alone=True)}
    if world > 1:
        step = partial(step, micros=MICROS // world)
        ways["no communication"] = step(base, alone=True)
        ways["data parallel"] = step(base)
        ways["expert parallel"] = step(replace(base, expert_parallel=world))
        ways["shard"] = step(replace(base, shard=True))
        ways["both"] = step(replace(base, expert_parallel=world, shard=True))
    found = measure("scale", ways, config, context)
    one, *shared = found
    for record in found:
        record["processes"] = 1 if record is one else world
        record["speedup"] = one["ms"] / record["ms"]
        record["communication"] = 0.0 if record is one else 1 - shared[0]["ms"] / record["ms"]
    columns = "processes impl runs ms spread speedup communication state_mb"
    show(found, columns, f"steps of {one['S']} tokens", context)
    return found


BENCHES = {"layer": (LayerConfig, bench_layer), "step": (Config, bench_step), "scale": (Config, bench_scale)}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__)
    with clear_errors():
        if name not in BENCHES:
            raise ValueError(f"{name!r} is nothing to measure: python tools/bench.py {' | '.join(BENCHES)}")
        Options, bench = BENCHES[name]
        config = parse(Options(), argv, bench.__doc__)
        check(config)
        if config.json:
            Path(config.json).touch()  # an error now is better than one when all is measured
        context = setup(config.device, config.dtype)
        where = machine(context)
        context.say(", ".join(f"{key} {value}" for key, value in where.items()))
        records = bench(config, context)
    if config.json and context.rank == 0:
        text = ",\n".join(json.dumps(record | {"machine": where}) for record in records)  # a record a line
        Path(config.json).write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
