"""Speed and memory of the MoE layer, of whole training steps and of translation, as ratios within one run.

    python bench.py layer                         four shapes, every router, and the peers that are installed
    python bench.py layer --against ../before     and the layer of another checkout, which takes turns with ours
    python bench.py step                          whole training steps at equal FLOPs
    python bench.py size                          how time and memory grow with tokens and with the number of experts
    python bench.py translate                     beam search with a key-value cache, and without
    python bench.py scale                         training steps of 1, 2 and 4 processes; 8 and 64 GPUs on paper
    python bench.py layer --device cuda --dtype bfloat16 --tokens 65536

`ratio` is time over that of a dense FFN with the FLOPs of the rows that are really kept: 1 is a layer that costs
nothing but its arithmetic. `to_compiled` is the same to an FFN with our GELU, which torch.compile fuses. All contenders
take turns, round by round, in one process; times are medians, `spread` is half the range between their quartiles.
Routers are part of what is timed, as are their gradients. `python bench.py layer --help` lists all options.
"""

import ctypes
import gc
import importlib
import json
import math
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import common
import measures
import model
import parallel
import routers
import runs
from translator import Translator

# ---------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass
class Config:
    """What all measurements read."""

    tokens: int = 4096  # of the layer, of a step, of all sources; size: the most
    rounds: int = 15  # how often each contender runs, after a first time for warming up
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: by autocast
    json: str | None = None  # file that receives the records


@dataclass
class TurnsConfig(Config):
    """What measurements read whose contenders take turns in one process: all but scale."""

    patience: float = 5.0  # seconds after which a slow contender has run often enough


class Contender(NamedTuple):
    run: Callable[[common.Context], dict]  # does it once -> what it measured beside the time of it all
    facts: dict  # what its record says that need not be measured


def measure(group: str, contenders: dict[str, Contender], config: TurnsConfig, context) -> list[dict]:
    """A record for each: facts, the medians of what was measured (times in ms), their spread, and memory."""
    records = []
    for name, samples in take_turns(group, contenders, config, context).items():
        record = {"shape": group, "impl": name, "runs": len(samples)} | contenders[name].facts
        for key in samples[0]:
            record[key] = statistics.median(sample[key] for sample in samples)
        record["all_ms"] = [sample["ms"] for sample in samples]
        record["spread"] = spread(record["all_ms"])
        record["peak_mb"] = peak_memory(contenders[name], context)
        records.append(record)
    return records


def take_turns(group: str, contenders: dict[str, Contender], config: TurnsConfig, context) -> dict[str, list[dict]]:
    """name -> what it measured, round by round; a slow one drops out once its patience is used up.

    The first round is for warming up. Every other one goes backwards: nobody always follows the same neighbour.
    """
    samples = {name: [] for name in contenders}
    order = list(contenders)
    for turn in tqdm(range(1 + config.rounds), desc=group, unit="round", leave=False):
        for name in order:
            if sum(sample["ms"] for sample in samples[name]) > 1e3 * config.patience:
                continue
            start = clock(context)
            sample = contenders[name].run(context)
            sample["ms"] = clock(context) - start
            if turn > 0:
                samples[name].append(sample)
        order.reverse()
    return samples


M_MMAP_THRESHOLD = -3  # glibc's number for the size from which a block is mapped


def clock(context) -> float:
    """Milliseconds, when all that the device was asked for is done."""
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


def spread(values: list[float]) -> float | None:
    """Half the range between the quartiles; None for a single value."""
    if len(values) < 2:
        return None
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2


def peak_memory(contender: Contender, context) -> float | None:
    """MB that a run needs at its peak, beyond what is there before; None where it cannot be told.

    On a CPU every large block is mapped on its own meanwhile: the heap's holes are the allocator's, not the run's.
    """
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.run(context)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:  # Linux: the highest resident size since it was reset
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
        contender.run(context)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)  # as in common.setup
        return (resident("VmHWM") - before) / 1024
    except (OSError, AttributeError, TypeError):
        return None


def resident(key: str) -> int:
    """KB of memory that this process has (VmRSS), or had at most (VmHWM)."""
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def show(records: list[dict], columns: str, title: str):
    columns = columns.split()
    rows = [[runs.cell(record[column]) for column in columns] for record in records]
    print(f"\n{title}\n\n{runs.markdown_table(columns, rows)}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# A layer as a contender


class Shape(NamedTuple):
    D: int  # model width
    E: int  # experts
    F: int  # inner width of one
    router: str
    K: int  # experts per token
    gamma: float  # capacity factor


LOGIT_STD = 2.75  # of what routers say of a token, so that they have preferences, as trained ones do
VOCABULARY = 8192


def random_tokens(S: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """h (1, S, D) and ids (1, S)"""
    torch.manual_seed(0)
    return torch.randn(1, S, D, device=device), torch.randint(VOCABULARY, (1, S), device=device)


def layer(module: nn.Module, call: Callable, h: Tensor, flops: float) -> Contender:
    """call: (1, S, D) -> output, balance loss. flops: of one forward pass over the rows that are kept."""
    return Contender(partial(one_pass, module, call, h), {"S": h.shape[1], "gflops": 3 * flops / 1e9})


def one_pass(module: nn.Module, call: Callable, h: Tensor, context) -> dict:
    """Forward and backward; the parameters' gradients are made anew, as in training."""
    x = h.detach().requires_grad_()
    start = clock(context)
    with context.autocast():
        y, balance = call(x)
    middle = clock(context)
    (y + balance).backward(h.to(y.dtype))  # any gradient will do
    end = clock(context)
    module.zero_grad(set_to_none=True)
    return {"forward_ms": middle - start, "backward_ms": end - middle}


def our_layer(version: ModuleType, shape: Shape, h: Tensor, ids: Tensor) -> Contender:
    """The layer of `version`: our model.py, or an earlier one. Both draw the same weights, and so choose alike."""
    size = dict(n_embd=shape.D, num_experts=shape.E, expert_size=shape.F, capacity_factor=shape.gamma)
    if shape.router in ("topk", "hypersphere"):  # X-MoE's router, with the shape's K
        size |= dict(select="topk", top_k=shape.K)
    config = version.ModelConfig(vocab_size=VOCABULARY, router=shape.router, **size)
    torch.manual_seed(0)
    moe = version.MoE(config, "tanh")
    if moe.router.score == "dot":
        nn.init.normal_(moe.router.experts, std=LOGIT_STD / math.sqrt(shape.D))
    nn.init.normal_(moe.layers[0].w_in, std=0.02)
    nn.init.normal_(moe.layers[0].w_out, std=0.02)
    moe = moe.to(h.device)
    stats = measures.RoutingStats(moe)
    with torch.no_grad():
        moe(h, ids)
    served = stats.finish()["served"]  # experts per token
    ours = layer(moe, lambda x: moe(x, ids), h, 4 * shape.D * shape.F * served * h.shape[1])
    ours.facts.update(E=shape.E, F=shape.F, rows_per_token=served)
    return ours


def earlier_version(folder: str) -> ModuleType:
    """`model` of another checkout, with the routers that it imports; ours stay what they are."""
    if not Path(folder, "model.py").exists():
        raise ValueError(f"--against {folder} is no checkout: it has no model.py")
    ours = {name: sys.modules.pop(name) for name in ("model", "routers")}
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("model")
    finally:
        sys.path.remove(folder)
        sys.modules.update(ours)


def dense_layers(h: Tensor, flops: float) -> dict[str, Contender]:
    """An FFN of width 4 D on as many of the tokens as make these FLOPs, with torch's GELU and with ours."""
    D = h.shape[2]
    each = 16 * D * D
    rows = max(1, round(flops / each))
    h = h[:, :rows]
    ffn = model.FFN(model.ModelConfig(n_embd=D, ffn_size=4 * D), "tanh").to(h.device)
    gate = torch.ones((), device=h.device)

    def plain(x: Tensor):
        return ffn(x), 0.0

    def compiled(x: Tensor):
        a = F.linear(x, ffn.fc.weight)
        activate = model.compiled_activation(a.device.type) if a.numel() >= model.WORTH_COMPILING else model.activation
        return ffn.proj(activate(a, ffn.fc.bias, gate, "tanh")), 0.0

    return {
        "dense": layer(ffn, plain, h, each * rows),
        "dense, compiled GELU": layer(ffn, compiled, h, each * rows),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Peers, with our tanh-GELU where nothing else is said.

GELU = "gelu_pytorch_tanh"


def hf_mixtral(implementation: str, shape: Shape, h: Tensor) -> Contender:
    """Hugging Face's Mixtral block: top-k without a capacity. Its experts have three matrices, two thirds as wide."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    width = 8 * round(2 * shape.F / 3 / 8)
    size = dict(hidden_size=shape.D, intermediate_size=width, num_local_experts=shape.E)
    config = MixtralConfig(**size, num_experts_per_tok=shape.K, hidden_act=GELU)
    config._experts_implementation = implementation
    block = draw(MixtralSparseMoeBlock(config), "gate.weight").to(h.device)
    return layer(block, lambda x: (block(x), 0.0), h, 6 * shape.D * width * shape.K * h.shape[1])


def hf_switch(activation: str, shape: Shape, h: Tensor) -> Contender:
    """Hugging Face's Switch layer: top-1 with a capacity, no biases."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    if shape.K > 1:
        raise ValueError(f"it has no top-{shape.K}")
    capacity = model.expert_capacity(h.shape[1], shape.E, shape.gamma)
    size = dict(d_model=shape.D, d_ff=shape.F, num_experts=shape.E, expert_capacity=capacity)
    config = SwitchTransformersConfig(**size, dense_act_fn=activation, dropout_rate=0.0, router_jitter_noise=0.0)
    block = draw(SwitchTransformersSparseMLP(config), "router.classifier.weight").to(h.device)
    with torch.no_grad():
        kept = int(block.router(h)[0].sum())
    return layer(block, lambda x: (block(x), 0.0), h, 4 * shape.D * shape.F * kept)


def draw(block: nn.Module, router: str) -> nn.Module:
    """Gives it weights as ours; router: the name of its router's, (E, D)."""
    for name, p in block.named_parameters():
        std = LOGIT_STD / math.sqrt(p.shape[1]) if name == router else 0.02
        nn.init.normal_(p, std=std)
    return block


PEERS = {
    "HF Mixtral, loop": partial(hf_mixtral, "eager"),
    "HF Mixtral, grouped_mm": partial(hf_mixtral, "grouped_mm"),
    "HF Switch": partial(hf_switch, GELU),
    "HF Switch, its ReLU": partial(hf_switch, "relu"),
}

# ---------------------------------------------------------------------------------------------------------------------
# python bench.py layer

SHAPES = {
    "S1": Shape(256, 8, 1024, "switch", 1, 1.0),
    "S2": Shape(256, 64, 128, "threshold", 8, 8.0),
    "S3": Shape(768, 64, 384, "topk", 8, 8.0),
    "S4": Shape(768, 32, 3072, "switch", 1, 1.0),
}


@dataclass
class LayerConfig(TurnsConfig):
    shapes: tuple[Literal["S1", "S2", "S3", "S4"], ...] = ("S1", "S2", "S3", "S4")  # some of these
    all_routers: bool = True  # false: only the one that the shape is about
    peers: bool = True  # other people's layers, where they are installed
    against: str | None = None  # folder of an earlier version, whose layer takes turns with ours


def bench_layer(config: LayerConfig, context) -> Iterator[dict]:
    """Forward and backward of one layer."""
    with common.clear_errors():
        earlier = earlier_version(config.against) if config.against else None
    for name in config.shapes:
        shape = SHAPES[name]
        found = measure(name, contenders(config, shape, earlier, context.device), config, context)
        dense, compiled, *_ = found
        for record in found:
            cost = record["ms"] / record["gflops"]
            record["ratio"] = cost / (dense["ms"] / dense["gflops"])
            record["to_compiled"] = cost / (compiled["ms"] / compiled["gflops"])
        columns = "impl runs forward_ms backward_ms ms spread peak_mb gflops ratio to_compiled"
        show(found, columns, f"{name}: S {config.tokens}, {shape}")
        if earlier:
            say_paired(found)
        yield from found


def contenders(config: LayerConfig, shape: Shape, earlier: ModuleType | None, device) -> dict[str, Contender]:
    """The dense ones have the FLOPs of the rows that ours keeps."""
    h, ids = random_tokens(config.tokens, shape.D, device)
    ours = our_layer(model, shape, h, ids)
    layers = dense_layers(h, ours.facts["gflops"] * 1e9 / 3) | {"ours": ours}
    if earlier:
        layers["ours, before"] = our_layer(earlier, shape, h, ids)
    for router in routers.ROUTERS if config.all_routers else ():
        if router != shape.router:
            layers[f"ours, {router}"] = our_layer(model, shape._replace(router=router), h, ids)
    if config.peers:  # with Mixtral's choices: K of all, no capacity
        layers["ours, no limit"] = our_layer(model, shape._replace(router="topk", gamma=math.inf), h, ids)
    for name, make in PEERS.items() if config.peers else ():
        try:
            layers[name] = make(shape, h)
        except Exception as error:  # not installed, without such a layer, or broken in one of many ways
            print(f"{name}: skipped ({type(error).__name__}: {str(error).splitlines()[0]})")
    return layers


def say_paired(found: list[dict]):
    """Of a round the quotient: both saw the machine in the same state."""
    ms = {record["impl"]: record["all_ms"] for record in found}
    quotients = [now / before for now, before in zip(ms["ours"], ms["ours, before"])]
    print(f"\nours / before, by rounds: {statistics.median(quotients):.3f} ± {spread(quotients) or math.nan:.3f}")


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py step


def decoders(**size) -> dict[str, model.ModelConfig]:
    """XMoE's models: experts in every second block, as wide as the dense FFN or an eighth of it."""
    ffn = 4 * size["n_embd"]
    config = partial(model.ModelConfig, **size, ffn_size=ffn)
    return {
        f"dense 1 x {ffn}": config(router="dense"),
        f"switch 8 x {ffn}": config(router="switch"),
        f"topk 64 x {ffn // 8}": config(router="topk", expert_size=ffn // 8),
        f"threshold 64 x {ffn // 8}": config(router="threshold", expert_size=ffn // 8),
    }


def encoders(expert: int, **size) -> dict[str, model.ModelConfig]:
    """X-MoE's models: one sparse layer of 32 experts, half-way; a dense encoder whose FFNs are as much wider."""
    ffn, layers = 4 * size["n_embd"], size["n_layer"]
    wider = ffn + 3 * expert // layers
    sparse = partial(model.ModelConfig, **size, ffn_size=ffn, expert_size=expert, moe_after=(layers // 2,))
    return {
        f"dense, FFN {wider}": model.ModelConfig(**size, ffn_size=wider, router="dense"),
        f"SMoE 32 x 3 x {expert}": sparse(router="switch"),
        f"X-MoE 32 x 3 x {expert}": sparse(router="hypersphere"),
    }


MASKED = 0.15  # share of its tokens that an encoder predicts
DEMO = dict(n_head=4, n_layer=4, vocab_size=VOCABULARY)
PAPER = dict(n_head=12, n_layer=12, n_embd=768)
STEPS = {
    "demo": {
        "width 256": (model.GPT, decoders(**DEMO, n_embd=256, block_size=256)),
        "width 768": (model.GPT, decoders(**DEMO, n_embd=768, block_size=256)),
        "encoder": (model.MaskedLM, encoders(256, **DEMO, n_embd=256, block_size=128)),
    },
    "paper": {
        "width 768": (model.GPT, decoders(**PAPER, block_size=1024, vocab_size=50_257)),
        "encoder": (model.MaskedLM, encoders(3072, **PAPER, block_size=512, vocab_size=250_002)),
    },
}


def bench_step(config: TurnsConfig, context) -> Iterator[dict]:
    """Forward, backward, clipping, AdamW: as in the training scripts, on random tokens, at equal active FLOPs."""
    fastest = common.peak_flops(context)
    for group, (kind, configs) in STEPS["paper" if context.device.type == "cuda" else "demo"].items():
        trainees = {name: trainee(kind, each, config.tokens, context.device) for name, each in configs.items()}
        found = measure(group, trainees, config, context)
        dense, switch, *_ = found
        for record in found:
            record["tokens_per_second"] = 1e3 * record["S"] / record["ms"]
            record["mfu"] = 1e12 * record["gflops"] / record["ms"] / fastest if fastest else None
            record["to_dense"] = record["ms"] / dense["ms"]
            record["to_switch"] = record["ms"] / switch["ms"]
        columns = "impl runs ms spread tokens_per_second mfu peak_mb to_dense to_switch"
        show(found, columns, f"{group}, {dense['S']} tokens")
        yield from found


def trainee(kind: type, config: model.ModelConfig, tokens: int, device: torch.device) -> Contender:
    """kind: GPT or MaskedLM. A step has as many whole sequences as the tokens make, one at least."""
    torch.manual_seed(0)
    net = kind(config).to(device)
    T, D, V = config.block_size, config.n_embd, config.vocab_size
    ids = torch.randint(V, (max(1, tokens // T), T), device=device)
    S = ids.numel()
    if kind is model.MaskedLM:
        masked = torch.randperm(S, device=device)[: round(MASKED * S)].sort().values
        inputs, targets = (ids, masked), ids.flatten()[masked]
        flops = measures.flops_per_token(net.encoder, config, head=MASKED * measures.masked_head_flops(config))
    else:
        inputs, targets = (ids,), ids.flatten()
        flops = measures.flops_per_token(net, config, head=2 * D * V)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    forward = torch.compile(net, dynamic=False) if ids.is_cuda else net
    run = partial(training_step, net, forward, optimizer, inputs, targets)
    return Contender(run, {"S": S, "gflops": 3 * flops["total"] * S / 1e9})


def training_step(net, forward, optimizer, inputs, targets, context) -> dict:
    with context.autocast():
        logits, balance = forward(*inputs)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), targets) + 0.01 * balance
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    net.after_step()
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py size


def bench_size(config: TurnsConfig, context) -> Iterator[dict]:
    """Tokens at 64 experts of width 128; then ever more and smaller experts, to width 1, at equal capacity.

    Rows are those that a threshold of 0.9 wants: from 256 experts on, fewer than the capacity has room for.
    """
    D, most = 256, config.tokens
    experts = [(8, 1024), (16, 512), (32, 256), (64, 128), (256, 32), (1024, 8), (4096, 1)]  # how many, of what width
    tokens = sorted({min(most, 2**n) for n in range(10, 17)})
    groups = {
        "tokens": [(S, 64, 128) for S in tokens],
        "experts": [(min(most, 4096), *size) for size in experts],
    }
    for group, sizes in groups.items():
        layers = {}
        for S, E, width in sizes:
            shape = Shape(D, E, width, "threshold", 1, 4 * D / width)
            layers[f"{S} tokens, {E} x {width}"] = our_layer(model, shape, *random_tokens(S, D, context.device))
        found = measure(group, layers, config, context)
        for record in found:
            S, E, width, peak = record["S"], record["E"], record["F"], record["peak_mb"]
            gradients = 4 * E * (2 * D * width + width + D) / 2**20
            record["us_per_token"] = 1e3 * record["ms"] / S
            record["kb_per_token"] = None if peak is None else 1024 * (peak - gradients) / S
        columns = "S E F runs ms spread us_per_token rows_per_token peak_mb kb_per_token"
        show(found, columns, f"more {group}, width {D}; kb_per_token is without the experts' gradients")
        yield from found


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py translate


SENTENCE = 16  # tokens of a source


def bench_translate(config: TurnsConfig, context) -> Iterator[dict]:
    """Beam search without a capacity limit. Weights and sources are random, so that few translations end early."""
    torch.manual_seed(0)
    size = dict(n_layer=4, decoder_layers=2, n_embd=128, ffn_size=512)
    translator = Translator(model.ModelConfig(vocab_size=VOCABULARY, **size)).to(context.device)
    sentences = max(1, config.tokens // SENTENCE)
    sources = torch.randint(VOCABULARY, (sentences, SENTENCE), device=context.device)

    def translate(beam: int, cache: bool, context) -> dict:
        with context.autocast():
            found = translator.translate(sources, bos=0, eos=1, beam=beam, cache=cache)
        return {"tokens": sum(len(ids) + 1 for ids in found)}

    for beam in (5, 1):
        ways = {
            "cache": Contender(partial(translate, beam, True), {}),
            "no cache": Contender(partial(translate, beam, False), {}),
        }
        found = measure(f"beam {beam}", ways, config, context)
        for record in found:
            record["sentences_per_second"] = 1e3 * sentences / record["ms"]
            record["tokens_per_second"] = 1e3 * record["tokens"] / record["ms"]
            record["ratio"] = record["ms"] / found[0]["ms"]
        columns = "impl runs ms spread tokens sentences_per_second tokens_per_second peak_mb ratio"
        show(found, columns, f"beam {beam}: {sentences} sentences of {SENTENCE} tokens")
        yield from found


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py scale


@dataclass
class ScaleConfig(Config):
    processes: tuple[int, ...] = (1, 2, 4)  # how many share a step; on CUDA each has a GPU of its own


MICROS = 4  # micro-batches of a step, which the processes share out
SMALL = dict(n_head=4, n_layer=4, n_embd=256, ffn_size=1024, vocab_size=VOCABULARY, block_size=256, expert_size=128)


SHARED_CORES = """
These processes share {cores} cores ({threads} threads each) and one memory; gloo copies by way of the loopback
device. More of them than cores cannot be faster. `communication` is what the same processes would be faster by if none
waited for another: mostly turns on a core that others have. What it can show is that the work is shared out evenly
and that each holds less; not what a network costs, which is below, on paper."""


class Way(NamedTuple):
    """How processes share a step; it is what parallel.py reads of a script's config."""

    expert_parallel: int
    shard: bool
    micro_tokens: int
    compile: bool = False


def bench_scale(config: ScaleConfig, context) -> Iterator[dict]:
    """The same training steps by more and more processes; the experts are 64 of width 128, under the threshold."""
    with common.clear_errors():
        for processes in config.processes:
            if processes < 1 or MICROS % processes:
                raise ValueError(f"{processes} processes cannot share out {MICROS} micro-batches evenly")
            if context.device.type == "cuda" and processes > torch.cuda.device_count():
                raise ValueError(f"{processes} processes need a GPU each, and there are {torch.cuda.device_count()}")
    found = []
    for processes in config.processes:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file, socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
            free.close()
            torch.multiprocessing.spawn(scale_worker, (processes, port, config, file.name), nprocs=processes)
            found += json.load(file)
    for record in found:
        record["steps_per_second"] = 1e3 / record["ms"]
        record["speedup"] = found[0]["ms"] / record["ms"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    columns = "processes impl runs ms spread steps_per_second speedup communication state_mb"
    show(found, columns, f"a step of {MICROS * micro_tokens_of(config)} tokens; speedup: over the first row")
    if context.device.type != "cuda":
        print(SHARED_CORES.format(cores=cores, threads=torch.get_num_threads()))
    paper = on_paper()
    columns = "model gpus expert_parallel state_gb exchange_kb gflops compute_ms exchange_ms gradients_ms communication"
    show(paper, columns, PAPER_TITLE)
    yield from found + paper


def micro_tokens_of(config: ScaleConfig) -> int:
    """A whole number of sequences."""
    T = SMALL["block_size"]
    return max(T, config.tokens // MICROS // T * T)


def scale_worker(rank: int, world: int, port: int, config: ScaleConfig, file: str):
    """One of the processes; the first writes the records. The ways take turns."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    context = common.setup(config.device, config.dtype)
    micro_tokens = micro_tokens_of(config)
    ways = {"no communication": Way(1, False, micro_tokens)}  # each has a model of its own
    if world > 1:
        ways["data parallel"] = Way(1, False, micro_tokens)
        ways["expert parallel"] = Way(world, False, micro_tokens)
        ways["shard"] = Way(1, True, micro_tokens)
        ways["both"] = Way(world, True, micro_tokens)
    steps = {name: scaled_step(way, name == "no communication", context) for name, way in ways.items()}
    times = {name: [] for name in ways}
    for turn in range(1 + config.rounds):
        for name, (step, _) in steps.items():
            context.barrier()
            start = clock(context)
            step()
            slowest = max(context.gather(clock(context) - start))
            if turn > 0:
                times[name].append(slowest)
    alone = statistics.median(times["no communication"])
    records = []
    for name, ms in times.items():
        record = {"processes": world, "impl": name, "runs": len(ms), "ms": statistics.median(ms), "all_ms": ms}
        record |= {"spread": spread(ms), "communication": 1 - alone / record["ms"], "state_mb": steps[name][1]}
        records.append(record)
    if rank == 0:
        Path(file).write_text(json.dumps(records))


def scaled_step(way: Way, alone: bool, context) -> tuple[Callable, float]:
    """-> a function that does this process's part of a training step, and MB of its weights, gradients and moments."""
    torch.manual_seed(0)
    net = model.GPT(model.ModelConfig(**SMALL)).to(context.device)
    if not alone:
        parallel.split(net, way, context)
    forward = net if alone else parallel.wrap(net, way, context)
    groups = {}
    for p in net.parameters():
        groups.setdefault(type(p), []).append(p)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], fused=True)
    T = SMALL["block_size"]
    ids = torch.randint(VOCABULARY, (way.micro_tokens // T, T), device=context.device)
    mine = range(context.rank, MICROS, context.world)

    def step():
        for micro in mine:
            forward.require_backward_grad_sync = micro == mine[-1]
            with context.autocast():
                logits, balance = forward(ids)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) + 0.01 * balance
            (loss / len(mine)).backward()
        if not alone:
            parallel.reduce(net)
        parallel.clip_grad_norm_(net, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    held = sum(parallel.local(p).numel() for p in net.parameters())
    return step, 16 * held / 2**20


# What is taken for granted of a cluster: 40% of an H100's dense bf16 peak; NVLink inside a node of 8, and a port of 400
# Gb/s a GPU between nodes, both at their nominal rate in one direction, in bytes a second.
SPEED, NODE, NVLINK, NETWORK = 0.4 * 989e12, 8, 450e9, 50e9
PAPER_TITLE = (
    "on paper, a step of 262,144 tokens, nothing hidden behind anything else; exchange_kb and gflops: of a token, "
    "forward and back; communication: its share of the step"
)


def on_paper() -> list[dict]:
    """XMoE's 556M row and Switch's, as published, and XMoE's at four times the width."""
    size = dict(n_layer=12, vocab_size=50_257, block_size=1024)
    xmoe = dict(n_embd=1024, n_head=16, ffn_size=4096)
    wide = dict(n_embd=4096, n_head=32, ffn_size=16384)
    configs = {
        "XMoE 32 x 1024": model.ModelConfig(**size, **xmoe, router="threshold"),
        "Switch 8 x 4096": model.ModelConfig(**size, **xmoe, router="switch"),
        "XMoE 32 x 4096": model.ModelConfig(**size, **wide, router="threshold"),
    }
    records = []
    for name, config in configs.items():
        with torch.device("meta"):
            net = model.GPT(config)
        E = net.moe_layers[0].router.num_experts
        for gpus in (8, 64):
            for N in sorted({1, 8, min(gpus, E)}):
                records.append({"model": name} | cost_on_paper(net, gpus, N))
    return records


def cost_on_paper(net: model.GPT, gpus: int, N: int, tokens: int = 1 << 18) -> dict:
    """A step by so many GPUs, the experts shared out over N neighbours.

    A row goes there and back, and so does its gradient: 4 D numbers of 2 bytes each, and gamma rows a token and layer,
    filled or not. Gradients are fp32; an all-reduce sends twice what a GPU has, and GPUs of a node that have the same
    share the way out.
    """
    config, mine = net.config, tokens / gpus
    flops = 3 * measures.flops_per_token(net, config, head=2 * config.n_embd * config.vocab_size)["total"]
    gamma = net.moe_layers[0].capacity_factor
    sent = len(net.moe_layers) * 4 * gamma * config.n_embd * 2 / N  # bytes of a token, to each of the N
    near = min(N, NODE) - 1  # of the others, so many are in the same node
    exchange = mine * sent * max(near / NVLINK, (N - 1 - near) / NETWORK)  # at once
    experts = sum(measures.numel(moe.layers) for moe in net.moe_layers)
    dense = measures.numel(net) - experts
    gradients = 0.0
    for size, apart in ((dense, 1), (experts / N, N)):  # those who have the same are so far apart
        link = NVLINK if gpus <= NODE else min(NVLINK, NETWORK * max(1, NODE // apart))
        copies = gpus // apart
        gradients += 2 * 4 * size * (copies - 1) / copies / link
    compute = mine * flops / SPEED
    return {
        "gpus": gpus,
        "expert_parallel": N,
        "state_gb": 16 * (dense + experts / N) / 2**30,
        "exchange_kb": sent * (N - 1) / 1024,
        "gflops": flops / 1e9,
        "compute_ms": 1e3 * compute,
        "exchange_ms": 1e3 * exchange,
        "gradients_ms": 1e3 * gradients,
        "communication": (exchange + gradients) / (compute + exchange + gradients),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The command line

BENCHES = {
    "layer": (bench_layer, LayerConfig()),
    "step": (bench_step, TurnsConfig()),
    "size": (bench_size, TurnsConfig(tokens=65536)),
    "translate": (bench_translate, TurnsConfig(tokens=2048)),
    "scale": (bench_scale, ScaleConfig(rounds=5)),
}


def check(config: Config):
    for name in ("tokens", "rounds", "patience"):
        value = getattr(config, name, 1)
        if not value > 0:
            raise ValueError(f"{name} must be over 0, not {value}")
    if config.json:
        Path(config.json).touch()  # better now than when all is measured


def main():
    with common.clear_errors():
        bench, default, options = runs.chosen(BENCHES, __doc__, "say what to measure")
        config = runs.parse(default, options, __doc__)
        check(config)
        context = common.setup(config.device, config.dtype)
    machine = common.machine(context)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    records = list(bench(config, context))
    if config.json:
        lines = [json.dumps(record | {"machine": machine}) for record in records]
        Path(config.json).write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
