"""How fast a sparse layer and whole training steps are, each beside what it should be compared with.

    python tools/bench.py layer                  one layer beside dense FFNs and Hugging Face's Mixtral
    python tools/bench.py step                   training steps of small models, at equal FLOPs
    python tools/bench.py layer --tokens 65536 --json layer.json

All contenders take turns, round by round. Times are medians in milliseconds, and `spread` is half the range between
their quartiles. The `ratio` of a layer, router included, is its time over that of a dense FFN with the FLOPs of the
rows that the experts really keep: 1 is a layer that costs nothing but its arithmetic. `to_compiled` compares with the
same FFN compiled. For a CUDA card there is tools/gpu.py.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are

import model
import train_lm
from analysis import flops, measures
from engine import parallel
from engine.device import clear_errors, setup
from engine.optim import adamw, cross_entropy
from engine.table import markdown_table
from routers import ROUTERS

VOCABULARY = 8192
PATIENCE = 5.0  # seconds, after which a slow contender has run often enough


@dataclass
class Config:
    what: tyro.conf.Positional[Literal["layer", "step"]]
    tokens: int = 4096  # of the layer's input, or of a training step
    rounds: int = 15  # how often each contender runs, after a first time for warming up
    shapes: tuple[Literal["S1", "S2", "S3", "S4"], ...] = ("S1", "S2", "S3", "S4")  # of the layer
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast
    json: Path | None = None  # file that receives the records


class Contender(NamedTuple):
    run: Callable[[], None]  # does the work once
    facts: dict  # what its record says that needs no measuring


def measure(group: str, contenders: dict[str, Contender], config: Config, context) -> list[dict]:
    """A record of each: its facts, the median of its times and their spread, and the memory that it needs."""
    calls = {name: contender.run for name, contender in contenders.items()}
    times = measures.in_turns(calls, context, config.rounds, PATIENCE)
    records = []
    for name, contender in contenders.items():
        own = times[name]
        first, middle, third = np.quantile(own, [0.25, 0.5, 0.75]).tolist()
        record = {"shape": group, "impl": name, "runs": len(own)}
        record |= {"ms": middle, "spread": (third - first) / 2, "all_ms": own}
        record["peak_mb"] = peak_memory(contender.run, context)
        records.append(record | contender.facts)
    return records


def peak_memory(run: Callable, context) -> float | None:
    """The MB on a GPU that a run needs at its peak beyond what is there before it."""
    if context.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# ---------------------------------------------------------------------------------------------------------------------
# One layer


SMALL = train_lm.Config(n_embd=256, ffn_size=1024)
LARGE = train_lm.Config(n_embd=768, ffn_size=3072)
SHAPES = {
    "S1": replace(SMALL, router="switch", split=1),  # 8 experts of width 1024
    "S2": replace(SMALL, router="threshold", split=8),  # 64 of 128
    "S3": replace(LARGE, router="topk", split=8),  # 64 of 384
    "S4": replace(LARGE, router="switch", split=1, expert_ffns=32),  # 32 of 3072
}
LOGIT_STD = 2.75  # of what a router says of a token, so that it has preferences as a trained one has


def bench_layer(config: Config, context) -> Iterator[list[dict]]:
    """Forward and backward pass of one layer: dense FFNs of its FLOPs; ours, under its router and others; Mixtral's."""
    for name in config.shapes:
        torch.manual_seed(0)
        h = torch.randn(1, config.tokens, SHAPES[name].n_embd).to(context.device)
        peers = {"HF Mixtral, grouped_mm": partial(mixtral, SHAPES[name], h, context)}
        yield measure_layers(name, SHAPES[name], h, peers, config, context)


def measure_layers(group: str, shape: train_lm.Config, h: Tensor, peers: dict, config, context) -> list[dict]:
    """Records of all that is compared on tokens h (1, S, D), with ratios of the times that equal FLOPs take."""
    ours = our_layer(shape, h, context)
    dense = partial(dense_layer, h, ours.facts["gflops"], context)
    found = {"dense": dense(), "ours": ours}
    for router in ROUTERS:
        if router != shape.router:
            other = replace(shape, router=router)
            found[f"ours, {router}"] = our_layer(other, h, context)
    no_limit = replace(shape, router="topk", capacity=math.inf)  # it chooses as Mixtral does
    found["ours, no limit"] = our_layer(no_limit, h, context)
    peers = {"dense, compiled": partial(dense, compiled=True)} | peers
    found |= those_that_run(peers, context)
    return compare(measure(group, found, config, context))


def those_that_run(makers: dict[str, Callable], context) -> dict[str, Contender]:
    """There may be no compiler, no such library, or one that has changed."""
    found = {}
    for name, make in makers.items():
        try:
            contender = make()
            contender.run()
            found[name] = contender
        except Exception as error:
            context.say(f"{name}: skipped ({type(error).__name__}: {error})")
    return found


def compare(records: list[dict]) -> list[dict]:
    """Adds ratios of the times that layers take for equal FLOPs."""
    cost = {record["impl"]: record["ms"] / record["gflops"] for record in records}
    for record in records:
        own, compiled = cost[record["impl"]], cost.get("dense, compiled")
        record["ratio"] = own / cost["dense"]
        record["to_compiled"] = own / compiled if compiled else None
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

    # Weights are read twice, and their gradients written; tokens pass in and out, both ways: in bfloat16.
    numbers = 3 * flops.numel(module) + 4 * h.numel()
    facts = {"S": h.shape[1], "gflops": 3 * gflops, "least_mb": 2e-6 * numbers}
    return Contender(run, facts)


def alone(module: nn.Module) -> Callable:
    """What gives the output of a module that has no balance loss."""
    return lambda x: (module(x), 0.0)


def sparse_ffn(shape: train_lm.Config) -> model.MoE:
    """Our layer with random weights."""
    torch.manual_seed(0)
    constants = replace(shape, router_std=LOGIT_STD / math.sqrt(shape.n_embd))
    moe = model.in_place_of_ffn(constants, VOCABULARY, "tanh")
    for p in moe.experts.parameters():
        nn.init.normal_(p, std=0.02)
    return moe


def our_layer(shape: train_lm.Config, h: Tensor, context, compiled: bool = False) -> Contender:
    moe = sparse_ffn(shape).to(h.device)
    ids = torch.randint(VOCABULARY, h.shape[:2]).to(h.device)
    stats = measures.RoutingStats(moe)
    with torch.no_grad():
        moe(h, ids)
    rows = stats.finish()["served"]  # per token
    gflops = 1e-9 * flops.row_flops(moe) * rows * h.shape[1]
    call = parallel.compiled(moe) if compiled else moe
    ours = layer(moe, lambda x: call(x, ids), h, gflops, context)
    ours.facts["rows_per_token"] = rows
    return ours


def dense_layer(h: Tensor, gflops: float, context, compiled: bool = False) -> Contender:
    """An FFN of width 4 D on as many of the tokens as make these FLOPs."""
    D = h.shape[2]
    each = 16e-9 * D**2  # GFLOPs of a token, forward
    S = max(1, round(gflops / 3 / each))
    constants = train_lm.Config(n_embd=D, ffn_size=4 * D)
    ffn = model.FFN(constants, "tanh").to(h.device)
    call = parallel.compiled(ffn) if compiled else ffn
    return layer(ffn, alone(call), h[:, :S], S * each, context)


def mixtral(shape: train_lm.Config, h: Tensor, context) -> Contender:
    """Hugging Face's Mixtral block: top-K without a capacity.

    Its experts have three matrices, and are two thirds as wide as ours, so that FLOPs and parameters are equal. Its
    weights have the type of our products, since autocast does not reach all of its own.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    D, K = shape.n_embd, shape.split
    width = 8 * round(shape.ffn_size / K / 12)
    config = MixtralConfig(hidden_size=D, intermediate_size=width, hidden_act="gelu_pytorch_tanh")
    config.num_local_experts, config.num_experts_per_tok = shape.expert_ffns * K, K
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.normal_(block.gate.weight, std=LOGIT_STD / math.sqrt(D))
    block.to(h.device, context.dtype)
    gflops = 6e-9 * D * width * K * h.shape[1]
    return layer(block, alone(block), h.to(context.dtype), gflops, context)


# ---------------------------------------------------------------------------------------------------------------------
# Training steps


def decoders(**changes) -> dict[str, train_lm.Config]:
    """XMoE's models: experts in every second block, as wide as the dense FFN or an eighth of it."""
    constants = train_lm.PRESETS["small"] | {"dropout": 0.0} | changes
    base = train_lm.Config(**constants)
    ffn = base.ffn_size
    return {
        f"dense 1 x {ffn}": replace(base, router="dense"),
        f"switch 8 x {ffn}": replace(base, router="switch"),
        f"topk 64 x {ffn // 8}": replace(base, router="topk", split=8),
        f"threshold 64 x {ffn // 8}": replace(base, router="threshold", split=8),
    }


STEPS = {"width 256": decoders(), "width 768": decoders(n_embd=768, ffn_size=3072)}


def bench_step(config: Config, context) -> Iterator[list[dict]]:
    """Forward, backward, clipping and AdamW on random tokens."""
    for group, models in STEPS.items():
        trainees = {}
        for name, constants in models.items():
            trainees[name] = trainee(constants, config.tokens, context)
        found = measure(group, trainees, config, context)
        dense, switch, *_ = found
        for record in found:
            record["tokens_per_second"] = 1e3 * record["S"] / record["ms"]
            record["to_dense"] = record["ms"] / dense["ms"]
            record["to_switch"] = record["ms"] / switch["ms"]
        yield found


def trainee(config: train_lm.Config, tokens: int, context, micros: int = 1) -> Contender:
    """Training steps of so many micro-batches of about so many random tokens."""
    torch.manual_seed(0)
    V = 50_257 if context.device.type == "cuda" else VOCABULARY
    sequences = max(1, tokens // config.block_size)
    ids = torch.randint(V, (sequences, config.block_size)).to(context.device)
    net = model.GPT(config, V).to(context.device)
    forward = parallel.wrap(net, config, context)
    optimizer = adamw(net, config)

    def run():
        for _ in range(micros):
            with context.autocast():
                logits, balance = forward(ids)
                loss = cross_entropy(logits.flatten(0, 1), ids.flatten())
            ((loss + config.balance_coef * balance) / micros).backward()
        parallel.clip_grad_norm_(net, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        net.after_step()

    S, head = micros * ids.numel(), 2 * config.n_embd * V
    work = flops.flops_per_token(net, config, head)
    return Contender(run, {"S": S, "gflops": 3e-9 * S * work})


BENCHES = {  # and the columns of its table
    "layer": (bench_layer, "shape impl runs ms spread ratio to_compiled peak_mb gflops"),
    "step": (bench_step, "shape impl runs ms spread tokens_per_second peak_mb to_dense to_switch"),
}


def cell(value: str | float | None) -> str:
    """A measurement in a table; empty where there is none."""
    if isinstance(value, float):
        return f"{value:,.2f}"
    return "" if value is None else str(value)


def main():
    config = tyro.cli(Config, description=__doc__, use_underscores=True)
    bench, columns = BENCHES[config.what]
    columns, lines = columns.split(), []
    with clear_errors():
        context = setup(config.device, config.dtype)
        machine = context.machine
        context.say(", ".join(f"{key} {value}" for key, value in machine.items()))
        for found in bench(config, context):
            rows = []
            for record in found:
                rows.append([cell(record[column]) for column in columns])
            context.say(f"\n{markdown_table(columns, rows)}")
            lines += [json.dumps(record | {"machine": machine}) for record in found]
            if config.json:
                text = ",\n".join(lines)
                config.json.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
