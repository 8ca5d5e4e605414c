"""How fast a sparse layer, whole training steps and several processes are, each beside what it should be compared with.

    python tools/bench.py layer                          one layer beside dense FFNs and Hugging Face's
    python tools/bench.py step                           training steps of the scripts' models, at equal FLOPs
    torchrun --nproc_per_node 4 tools/bench.py scale     what it costs that processes share a training step
    python tools/bench.py layer --device cuda --tokens 65536 --json layer.json

All contenders take turns, round by round, so that each sees the machine in the same state. Times are medians in
milliseconds, and `spread` is half the range between their quartiles. The `ratio` of a layer is its time over that of a
dense FFN with the FLOPs of the rows that the experts really keep: 1 is a layer that costs nothing but its arithmetic.
`to_compiled` compares with a dense FFN whose GELU is compiled, as that of our experts is. Routers are part of what is
timed. `python tools/bench.py layer --help` lists the options.
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are

import model
import train_lm
import train_mlm
from analysis import flops, measures
from engine import parallel
from engine.config import check, parse
from engine.device import clear_errors, machine, peak_flops, setup
from engine.optim import adamw, cross_entropy
from engine.table import cell, markdown_table
from routers import ROUTERS

VOCABULARY = 8192

# ---------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass
class Config:
    """What all measurements read."""

    tokens: int = 4096  # of the layer's input, or of a training step
    rounds: int = 15  # how often each contender runs, behind a first time for warming up
    patience: float = 5.0  # seconds, behind which a slow contender has run often enough
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast
    json: str | None = None  # file that receives the records


class Contender(NamedTuple):
    run: Callable[[], None]  # does the work once
    facts: dict  # what its record says that needs no measuring


def measure(group: str, contenders: dict, config: Config, context) -> list[dict]:
    """A record of each Contender: its facts, the median of its times and their spread, and the memory that it needs."""
    records = []
    for name, times in take_turns(contenders, config, context).items():
        record = {"shape": group, "impl": name, "runs": len(times)}
        record |= contenders[name].facts
        record["ms"] = statistics.median(times)
        record |= {"all_ms": times, "spread": spread(times)}
        record["peak_mb"] = peak_memory(contenders[name], context)
        records.append(record)
    return records


def take_turns(contenders: dict, config: Config, context) -> dict[str, list[float]]:
    """The times of each contender in ms, round by round. Several processes run the same one together.

    The first round warms up and does not count. Every other round goes backwards, so that nobody always follows the
    same neighbour. A contender drops out when its times add up to the patience.
    """
    times = {name: [] for name in contenders}
    order = list(contenders)
    rounds = tqdm(range(1 + config.rounds), leave=False, disable=context.rank > 0)
    for turn in rounds:
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
    return times


def clock(context) -> float:
    """Milliseconds, read when the device has done all that it was asked for."""
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


def spread(values: list[float]) -> float | None:
    """Half the range between the quartiles; None for a single value."""
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2


def peak_memory(contender: Contender, context) -> float | None:
    """The MB that a run needs at its peak beyond what is there before it; None on a CPU, whose allocator hides it."""
    if context.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender.run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def show(records: list[dict], columns: str, title: str, context):
    columns, rows = columns.split(), []
    for record in records:
        rows.append([cell(record[column]) for column in columns])
    context.say(f"\n{title}\n\n{markdown_table(columns, rows)}")


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
    others: bool = True  # time all routers, and Hugging Face's layer if it is installed


def bench_layer(config: LayerConfig, context) -> list[dict]:
    """Forward and backward pass of one layer."""
    records = []
    for name in config.shapes:
        shape = SHAPES[name]
        found = measure(name, contenders(config, shape, context), config, context)
        dense, compiled, *_ = found
        for record in found:
            cost = record["ms"] / record["gflops"]
            record["ratio"] = cost * dense["gflops"] / dense["ms"]
            record["to_compiled"] = cost * compiled["gflops"] / compiled["ms"]
        columns = "impl runs ms spread ratio to_compiled peak_mb gflops"
        show(found, columns, f"{name}: {config.tokens} tokens, {shape}", context)
        records += found
    return records


def contenders(config: LayerConfig, shape: Shape, context) -> dict[str, Contender]:
    """Dense FFNs with the FLOPs of the rows that our layer keeps, our layer, and the others."""
    torch.manual_seed(0)
    h = torch.randn(1, config.tokens, shape.D, device=context.device)
    ours = our_layer(shape, h, context)
    layers = dense_layers(h, ours.facts["gflops"], context)
    layers["ours"] = ours
    if not config.others:
        return layers
    for router in ROUTERS:
        other = shape._replace(router=router)
        if other != shape:
            layers[f"ours, {router}"] = our_layer(other, h, context)
    no_limit = shape._replace(router="topk", gamma=math.inf)  # it chooses as Mixtral does
    layers["ours, no limit"] = our_layer(no_limit, h, context)
    for name, implementation in PEERS.items():
        try:
            layers[name] = hf_mixtral(implementation, shape, h, context)
        except Exception as error:  # it is not installed, or fails in one of many ways
            context.say(f"{name}: skipped ({type(error).__name__}: {error})")
    return layers


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
    gflops = 4e-9 * shape.D * shape.F * rows * h.shape[1]
    ours = layer(moe, lambda x: moe(x, ids), h, gflops, context)
    ours.facts.update(E=shape.E, F=shape.F, rows_per_token=rows)
    return ours


def dense_layers(h: Tensor, gflops: float, context) -> dict[str, Contender]:
    """An FFN of width 4 D on as many of the tokens as make these FLOPs, with torch's GELU and with that of our experts.

    Below model.WORTH_COMPILING our experts compile nothing, and neither does it.
    """
    D = h.shape[2]
    gate = torch.ones((), device=h.device)
    constants = train_lm.Config(n_embd=D, ffn_size=4 * D)
    ffn = model.FFN(constants, "tanh").to(h.device)
    each = 16e-9 * D**2  # GFLOPs of a token, forward
    S = max(1, round(gflops / 3 / each))
    h = h.narrow(1, 0, S)

    def plain(x: Tensor) -> tuple[Tensor, float]:
        return ffn(x), 0.0

    def compiled(x: Tensor) -> tuple[Tensor, float]:
        a = F.linear(x, ffn.fc.weight)
        activate = model.activation
        if a.numel() >= model.WORTH_COMPILING:
            activate = model.compiled_activation(a.device.type)
        z = activate(a, ffn.fc.bias, gate, "tanh")
        return ffn.proj(z), 0.0

    return {
        "dense": layer(ffn, plain, h, S * each, context),
        "dense, compiled GELU": layer(ffn, compiled, h, S * each, context),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's layer. Under autocast our layer multiplies in bf16; this one has weights of that type instead, since
# autocast does not reach all of its products.


def hf_mixtral(implementation: str, shape: Shape, h: Tensor, context) -> Contender:
    """Hugging Face's Mixtral block: top-K without a capacity.

    Its experts have three matrices, and are two thirds as wide as ours, so that FLOPs and parameters are equal.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    width = 8 * round(shape.F / 12)
    config = MixtralConfig(
        hidden_size=shape.D,
        intermediate_size=width,
        num_local_experts=shape.E,
        num_experts_per_tok=shape.K,
        hidden_act="gelu_pytorch_tanh",
    )
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

MASKED = 0.15  # share of its tokens that an encoder predicts


def decoders(preset: str, **changes) -> dict[str, train_lm.Config]:
    """XMoE's models: experts in every second block, as wide as the dense FFN or an eighth of it."""
    base = train_lm.Config(**train_lm.PRESETS[preset])
    base = replace(base, dropout=0.0, **changes)
    ffn = base.ffn_size
    return {
        f"dense 1 x {ffn}": replace(base, router="dense"),
        f"switch 8 x {ffn}": replace(base, router="switch"),
        f"topk 64 x {ffn // 8}": replace(base, router="topk", split=8),
        f"threshold 64 x {ffn // 8}": replace(base, router="threshold", split=8),
    }


def encoders(preset: str, **changes) -> dict[str, train_mlm.Config]:
    """X-MoE's models, and a dense encoder whose FFNs are so much wider that it costs as much."""
    base = train_mlm.Config(**train_mlm.PRESETS[preset])
    base = replace(base, dropout=0.0, **changes)
    added = base.expert_layers * base.expert_size
    wider = base.ffn_size + added // base.n_layer
    experts = f"{base.experts} x {base.expert_layers} x {base.expert_size}"
    return {
        f"dense, FFN {wider}": replace(base, router="dense", ffn_size=wider),
        f"SMoE {experts}": replace(base, router="switch"),
        f"X-MoE {experts}": replace(base, router="hypersphere"),
    }


STEPS = {  # device: title of a group -> its models
    "cpu": {
        "width 256": decoders("small"),
        "width 768": decoders("small", n_embd=768, ffn_size=3072),
        "encoder": encoders("small", block_size=128, relative_bias=False),
    },
    "cuda": {
        "width 768": decoders("openwebtext-323M", compile=True),
        "encoder": encoders("base", compile=True),
    },
}


def bench_step(config: Config, context) -> list[dict]:
    """Forward, backward, clipping and AdamW on random tokens."""
    records, fastest = [], peak_flops(context)
    device = "cuda" if context.device.type == "cuda" else "cpu"
    for group, models in STEPS[device].items():
        trainees = {}
        for name, constants in models.items():
            trainees[name] = trainee(constants, config.tokens, context)
        found = measure(group, trainees, config, context)
        dense, switch, *_ = found
        for record in found:
            seconds = record["ms"] / 1e3
            record["steps_per_second"] = 1 / seconds
            record["tokens_per_second"] = record["S"] / seconds
            speed = 1e9 * record["gflops"] / seconds
            record["mfu"] = speed / fastest if fastest else None
            record["to_dense"] = record["ms"] / dense["ms"]
            record["to_switch"] = record["ms"] / switch["ms"]
        columns = "impl runs ms spread steps_per_second tokens_per_second mfu peak_mb to_dense to_switch"
        show(found, columns, f"{group}: steps of {dense['S']} tokens", context)
        records += found
    return records


def trainee(constants, tokens: int, context, micros: int = 1, alone: bool = False) -> Contender:
    """Training steps of so many micro-batches of about so many tokens, in one whole sequence at least.

    constants: of train_lm.py or train_mlm.py. alone: this process waits for no other.
    """
    torch.manual_seed(0)
    T, batch = constants.block_size, max(1, tokens // constants.block_size)
    constants = replace(constants, micro_tokens=batch * T)
    net, inputs, targets, work = random_task(constants, context.device)
    forward = net if alone else parallel.wrap(net, constants, context)
    optimizer = adamw(net, constants)

    def run():
        for micro in range(micros):
            forward.require_backward_grad_sync = micro == micros - 1  # processes exchange gradients once
            with context.autocast():
                logits, balance = forward(*inputs)
                loss = cross_entropy(logits.flatten(0, -2), targets)
            loss = loss + constants.balance_coef * balance
            (loss / micros).backward()
        parallel.clip_grad_norm_(net, constants.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        net.after_step()

    held = sum(parallel.local(p).numel() for p in net.parameters())
    S = micros * batch * T
    facts = {"S": S, "gflops": 3e-9 * S * work}
    facts["state_mb"] = 16 * held / 2**20  # weights, gradients and Adam's two moments, in fp32
    return Contender(run, facts)


def random_task(constants, device: torch.device) -> tuple:
    """-> a model, a micro-batch of random tokens and their targets, and the forward FLOPs of one of its tokens."""
    V, S, T = VOCABULARY, constants.micro_tokens, constants.block_size
    of_masks = isinstance(constants, train_mlm.Config)
    if device.type == "cuda":
        V = 250_002 if of_masks else 50_257
    ids = torch.randint(V, (S // T, T), device=device)
    if not of_masks:
        net = model.GPT(constants, V).to(device)
        work = flops.flops_per_token(net, constants, head=2 * constants.n_embd * V)
        return net, (ids,), ids.flatten(), work["total"]
    net = model.MaskedLM(constants, V).to(device)
    work = flops.flops_per_token(net.encoder, constants, head=MASKED * flops.masked_head_flops(net))
    masked = torch.randperm(S, device=device)[: round(MASKED * S)]
    masked = masked.sort().values
    return net, (ids, masked), ids.flatten()[masked], work["total"]


# ---------------------------------------------------------------------------------------------------------------------
# Several processes

MICROS = 4  # micro-batches of a step, which the processes share out


def bench_scale(config: Config, context) -> list[dict]:
    """Training steps that the processes of torchrun share, beside those of one process while the others wait.

    `communication` is the share of a step that the same processes save where none waits for another; `state_mb` are
    the weights, gradients and moments of each. On one CPU, processes share cores and memory: it shows that the work is
    shared out evenly, not what a network costs.
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
        record["processes"] = world
        record["steps_per_second"] = 1e3 / record["ms"]
        record["speedup"] = one["ms"] / record["ms"]
        record["communication"] = 0.0
    one["processes"] = 1
    for record in shared:
        record["communication"] = 1 - shared[0]["ms"] / record["ms"]
    columns = "processes impl runs ms spread steps_per_second speedup communication state_mb"
    show(found, columns, f"steps of {one['S']} tokens", context)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The command line

BENCHES = {
    "layer": (LayerConfig, bench_layer),
    "step": (Config, bench_step),
    "scale": (Config, bench_scale),
}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__)
    with clear_errors():
        if name not in BENCHES:
            names = " | ".join(BENCHES)
            raise ValueError(f"{name!r} is nothing to measure: python tools/bench.py {names}")
        Options, bench = BENCHES[name]
        config = parse(Options(), argv, bench.__doc__)
        check(config)
        if config.json:
            Path(config.json).touch()  # an error now is better than one when all is measured
        context = setup(config.device, config.dtype)
        where = machine(context)
        words = [f"{key} {value}" for key, value in where.items()]
        context.say(", ".join(words))
        records = bench(config, context)
    if config.json and context.rank == 0:
        lines = [json.dumps(record | {"machine": where}) for record in records]
        text = ",\n".join(lines)  # a record a line
        Path(config.json).write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
