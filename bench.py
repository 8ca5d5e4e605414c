"""Speed and memory of the MoE layer, of whole training steps and of translation, as ratios within one run.

    python bench.py layer                         four shapes, every router, and the peers that are installed
    python bench.py layer --against ../before     and the layer of another checkout, which takes turns with ours
    python bench.py step                          whole training steps at equal FLOPs
    python bench.py size                          how time and memory grow with tokens and with the number of experts
    python bench.py translate                     beam search with a key-value cache, and without
    python bench.py layer --device cuda --dtype bfloat16 --tokens 65536

`ratio` is time over that of a dense FFN with the FLOPs of the rows that are really kept: 1 is a layer that costs
nothing but its arithmetic. `to_compiled` is the same to an FFN with our GELU, which torch.compile fuses. All contenders
take turns, round by round, in one process; times are medians, `spread` is half the range between their quartiles.
Routers are part of what is timed, as are their gradients. `python bench.py layer --help` lists all options.
"""

import ctypes
import gc
import importlib
import inspect
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import common
import measures
import model
import pretrained
import runs
from data.batches import TranslationData
from data.prepare import ready
from translator import Translator

# ---------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass
class Config:
    """What all measurements read."""

    rounds: int = 15  # how often each contender runs, after a first time for warming up
    patience: float = 5.0  # seconds after which a slow contender has run often enough
    seed: int = 0  # of weights and tokens
    threads: int | None = None  # of the CPU; None: as torch chooses
    keep_memory: bool = True  # on a CPU: freed memory stays with the process, as in the training scripts
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: by autocast
    json: str | None = None  # file that receives the records


def clock(context) -> float:
    """Milliseconds, when all that the device was asked for is done."""
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


def measure(group: str, runners: dict[str, Callable], config: Config, context) -> list[dict]:
    """A record for each of the runners: the medians of what it measures, and more of its `ms`."""
    records = []
    for name, samples in take_turns(group, runners, config).items():
        record = {"shape": group, "impl": name, "dtype": config.dtype}
        record["runs"] = len(samples)
        for key in samples[0]:
            record[key] = statistics.median(sample[key] for sample in samples)
        record["all_ms"] = [sample["ms"] for sample in samples]
        record["spread"] = spread(record["all_ms"])
        record["peak_mb"] = peak_memory(runners[name], context)
        records.append(record)
    return records


def take_turns(group: str, runners: dict[str, Callable], config: Config) -> dict[str, list[dict]]:
    """name -> what it measured, round by round; a slow one drops out once its patience is used up.

    The first round is for warming up. Every other one goes backwards: nobody always follows the same neighbour.
    """
    samples = {name: [] for name in runners}
    spent = dict.fromkeys(runners, 0.0)
    order = list(runners)
    for turn in tqdm(range(1 + config.rounds), desc=group, unit="round", leave=False):
        for name in order:
            if spent[name] > config.patience:
                continue
            start = time.perf_counter()
            sample = runners[name]()
            if turn > 0:
                spent[name] += time.perf_counter() - start
                samples[name].append(sample)
        order.reverse()
    return samples


def spread(values: list[float]) -> float | None:
    """Half the range between the quartiles; None for a single value."""
    if len(values) < 2:
        return None
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2


def peak_memory(run: Callable, context) -> float | None:
    """MB that `run` needs at its peak, beyond what is there before; None where it cannot be told."""
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:  # Linux: the highest resident size since it was reset
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        run()
        return (resident("VmHWM") - before) / 1024
    except (OSError, AttributeError, TypeError):
        return None


def resident(key: str) -> int:
    """KB of memory that this process has (VmRSS), or had at most (VmHWM)."""
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def show(records: list[dict], columns: str, title: str):
    columns = columns.split()
    rows = [[in_words(record[column]) for column in columns] for record in records]
    print(f"\n{title}\n\n{runs.markdown_table(columns, rows)}", flush=True)


def in_words(value) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return "" if value is None else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# A layer and its contenders


class Shape(NamedTuple):
    D: int  # model width
    E: int  # experts
    F: int  # inner width of one
    router: str  # what the shape is about
    K: int  # experts per token
    gamma: float  # capacity factor


SHAPES = {
    "S1": Shape(256, 8, 1024, "switch", 1, 1.0),
    "S2": Shape(256, 64, 128, "threshold", 8, 8.0),
    "S3": Shape(768, 64, 384, "topk", 8, 8.0),
    "S4": Shape(768, 32, 3072, "switch", 1, 1.0),
}
ROUTERS = ("switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice")
LOGIT_STD = 2.75  # of what routers say of a token, so that they have preferences, as trained ones do
VOCABULARY = 8192


class Contender(NamedTuple):
    module: nn.Module
    call: Callable  # (1, S, D) -> its output, and losses beside it if there are any
    flops: float  # of one forward pass over the rows that are kept

    def measure(self, h: Tensor, context) -> dict:
        """One pass forward and backward; the parameters' gradients are made anew, as in training."""
        x = h.detach().requires_grad_()
        start = clock(context)
        with context.autocast():
            y, *losses = self.call(x)
        middle = clock(context)
        losses = [loss for loss in losses if loss.requires_grad]
        gradient = h[:, : y.shape[1]].to(y.dtype)  # any numbers will do
        torch.autograd.backward([y, *losses], [gradient, *map(torch.ones_like, losses)])
        end = clock(context)
        self.module.zero_grad(set_to_none=True)
        return {"forward_ms": middle - start, "backward_ms": end - middle, "ms": end - start}


def our_layer(version: ModuleType, shape: Shape, router: str, h: Tensor, ids: Tensor, seed: int) -> Contender:
    """The layer of `version`: our model.py, or an earlier one. Both draw the same routers, and so choose alike."""
    size = dict(n_embd=shape.D, num_experts=shape.E, expert_size=shape.F, capacity_factor=shape.gamma)
    if router in ("topk", "hypersphere"):  # X-MoE's router, with the shape's K
        size |= dict(select="topk", top_k=shape.K)
    config = version.ModelConfig(vocab_size=VOCABULARY, router=router, **size)
    torch.manual_seed(seed)
    says_gelu = "gelu" in inspect.signature(version.MoE).parameters  # an earlier one said it in its config
    moe = version.MoE(config, "tanh") if says_gelu else version.MoE(config)
    if moe.router.score == "dot":
        nn.init.normal_(moe.router.experts, std=LOGIT_STD / math.sqrt(shape.D))
    nn.init.normal_(moe.layers[0].w_in, std=0.02)
    nn.init.normal_(moe.layers[0].w_out, std=0.02)
    moe = moe.to(h.device)
    with torch.no_grad():
        routing = moe.router(h.flatten(0, 1), ids.flatten())
    capacity = model.expert_capacity(h.shape[1], shape.E, shape.gamma)
    kept = int(model.within_capacity(routing.priority, capacity).sum())
    return Contender(moe, lambda x: moe(x, ids), 4 * shape.D * shape.F * kept)


def dense_layers(shape: Shape, flops: float, device: torch.device) -> dict[str, Contender]:
    """An FFN of width 4 D on as many tokens as make these FLOPs, with torch's GELU and with ours."""
    each = 16 * shape.D * shape.D
    rows = max(1, round(flops / each))
    ffn = model.FFN(model.ModelConfig(n_embd=shape.D, ffn_size=4 * shape.D), "tanh").to(device)
    one = torch.ones((), device=device)

    def eager(x: Tensor):
        return (ffn(x[:, :rows]),)

    def compiled(x: Tensor):
        a = F.linear(x[:, :rows], ffn.fc.weight)
        activate = model.compiled_activation() if is_compiled(a.numel()) else model.activation
        return (ffn.proj(activate(a, ffn.fc.bias, one, "tanh")),)

    return {
        "dense": Contender(ffn, eager, each * rows),
        "dense, compiled GELU": Contender(ffn, compiled, each * rows),
    }


def is_compiled(numbers: float) -> bool:
    """Whether ours is, between products of so many numbers."""
    return numbers >= model.WORTH_COMPILING and model.compiled_activation() is not model.activation


def compile_seconds(context) -> float:
    """What the compiled activation's first call in this process takes beyond a warm one, forward and backward."""
    times = []
    for _ in range(2):
        a = torch.randn(64, 256, device=context.device, requires_grad=True)
        b = torch.randn_like(a, requires_grad=True)
        gate = torch.randn_like(a[:, :1], requires_grad=True)
        start = clock(context)
        z = model.compiled_activation()(a, b, gate, "tanh")
        z.sum().backward()
        times.append(clock(context) - start)
    return (times[0] - times[1]) / 1e3


def earlier_version(folder: str) -> ModuleType:
    """`model` of another checkout. It keeps the modules that it imports, and ours stay what they are."""
    if not Path(folder, "model.py").exists():
        raise ValueError(f"--against {folder} is no checkout: it has no model.py")
    names = {file.stem for file in Path(folder).glob("*.py")}
    ours = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("model")
    finally:
        sys.path.remove(folder)
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(ours)


# ---------------------------------------------------------------------------------------------------------------------
# Peers: contenders, or None where the peer has no such layer. With our tanh-GELU where nothing else is said.

GELU = "gelu_pytorch_tanh"


def hf_mixtral(implementation: str, shape: Shape, h: Tensor) -> Contender:
    """Hugging Face's Mixtral block: top-k without a capacity, three matrices an expert."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    size = dict(hidden_size=shape.D, intermediate_size=shape.F, num_local_experts=shape.E)
    config = MixtralConfig(**size, num_experts_per_tok=shape.K, hidden_act=GELU)
    config._experts_implementation = implementation
    block = draw(MixtralSparseMoeBlock(config), "gate.weight").to(h.device)
    return Contender(block, lambda x: (block(x),), 6 * shape.D * shape.F * shape.K * h.shape[1])


def hf_switch(activation: str, shape: Shape, h: Tensor) -> Contender | None:
    """Hugging Face's Switch layer: top-1 with a capacity, no biases."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    if shape.K > 1:
        return None
    capacity = model.expert_capacity(h.shape[1], shape.E, shape.gamma)
    size = dict(d_model=shape.D, d_ff=shape.F, num_experts=shape.E, expert_capacity=capacity)
    config = SwitchTransformersConfig(**size, dense_act_fn=activation, dropout_rate=0.0, router_jitter_noise=0.0)
    block = draw(SwitchTransformersSparseMLP(config), "router.classifier.weight").to(h.device)
    with torch.no_grad():
        kept = int(block.router(h)[0].sum())
    return Contender(block, lambda x: (block(x),), 4 * shape.D * shape.F * kept)


def st_moe(shape: Shape, h: Tensor) -> Contender | None:
    """lucidrains' ST-MoE layer: top-n with a capacity, GEGLU of two thirds the width, dispatch by one-hot einsum."""
    from st_moe_pytorch import MoE

    if shape.K == 1:
        return None
    size = dict(expert_hidden_mult=shape.F / shape.D, gating_top_n=shape.K, capacity_factor_train=shape.gamma)
    block = draw(MoE(shape.D, shape.E, **size, threshold_train=0.0), "gate.to_gates.weight").to(h.device)
    with torch.no_grad():
        kept = int(block.gate(h)[0].count_nonzero())
    return Contender(block, lambda x: block(x)[:2], 6 * shape.D * int(shape.F * 2 / 3) * kept)


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
    "st-moe-pytorch": st_moe,
}


def installed_peers(shape: Shape, h: Tensor) -> dict[str, Contender]:
    peers = {}
    for name, make in PEERS.items():
        try:
            peers[name] = make(shape, h)
        except Exception as error:  # not installed, or broken in one of many ways; ours go on
            print(f"{name}: skipped ({type(error).__name__}: {str(error).splitlines()[0]})")
    return {name: peer for name, peer in peers.items() if peer}


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py layer


@dataclass
class LayerConfig(Config):
    tokens: int = 4096  # S
    shapes: tuple[Literal["S1", "S2", "S3", "S4"], ...] = ("S1", "S2", "S3", "S4")  # some of these
    all_routers: bool = True  # false: only the one that the shape is about
    peers: bool = True  # other people's layers, where they are installed
    against: str | None = None  # folder of an earlier version, whose layer takes turns with ours


def bench_layer(config: LayerConfig, context) -> list[dict]:
    """Forward and backward of one layer."""
    with common.clear_errors():
        earlier = earlier_version(config.against) if config.against else None
    records = []
    for name in config.shapes:
        shape = SHAPES[name]
        torch.manual_seed(config.seed)
        h = torch.randn(1, config.tokens, shape.D, device=context.device)
        ids = torch.randint(VOCABULARY, (1, config.tokens), device=context.device)
        layers = contenders(config, shape, earlier, h, ids)
        activations = layers["ours"].flops / (4 * shape.D)
        if not records and is_compiled(activations):
            print(f"compiling the activation took {compile_seconds(context):.1f} s, less where torch had it on disk")
        runners = {impl: partial(layer.measure, h, context) for impl, layer in layers.items()}
        found = measure(name, runners, config, context)
        cost = {record["impl"]: record["ms"] / layers[record["impl"]].flops for record in found}
        for record in found:
            impl = record["impl"]
            record["S"] = config.tokens
            record["gflops"] = 3 * layers[impl].flops / 1e9
            record["ratio"] = cost[impl] / cost["dense"]
            record["to_compiled"] = cost[impl] / cost["dense, compiled GELU"]
        columns = "impl runs forward_ms backward_ms ms spread peak_mb gflops ratio to_compiled"
        show(found, columns, f"{name}: S {config.tokens}, {shape}")
        if earlier:
            say_paired(found)
        records += found
    return records


def contenders(config: LayerConfig, shape: Shape, earlier: ModuleType | None, h: Tensor, ids: Tensor) -> dict:
    """name -> contender; the dense ones have the FLOPs of the rows that ours keeps."""
    layer = partial(our_layer, shape=shape, h=h, ids=ids, seed=config.seed)
    ours = layer(model, router=shape.router)
    layers = dense_layers(shape, ours.flops, h.device) | {"ours": ours}
    if earlier:
        layers["ours, before"] = layer(earlier, router=shape.router)
    for router in ROUTERS if config.all_routers else ():
        if router != shape.router:
            layers[f"ours, {router}"] = layer(model, router=router)
    if config.peers:
        layers |= installed_peers(shape, h)
    return layers


def say_paired(found: list[dict]):
    """Of a round the quotient: both saw the machine in the same state."""
    ms = {record["impl"]: record["all_ms"] for record in found}
    quotients = [now / before for now, before in zip(ms["ours"], ms["ours, before"])]
    print(f"\nours / before, by rounds: {statistics.median(quotients):.3f} ± {spread(quotients) or math.nan:.3f}")


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py step


@dataclass
class StepConfig(Config):
    tokens: int | None = None  # of a step; None: 4096, on CUDA 16384


def bench_step(config: StepConfig, context) -> list[dict]:
    """Forward, backward, clipping, AdamW: as in the training scripts, on random tokens, at equal active FLOPs."""
    cuda = context.device.type == "cuda"
    tokens = config.tokens or (16 * 1024 if cuda else 4096)
    groups = STEPS["paper" if cuda else "demo"]
    longest = max(size["block_size"] for _, size in groups.values())
    with common.clear_errors():
        if tokens % longest:
            raise ValueError(f"tokens must be a multiple of {longest}, the length of a sequence, not {tokens}")
    records = []
    for group, (make, size) in groups.items():
        torch.manual_seed(config.seed)
        trainees = make(size, tokens, context.device)
        runners = {name: make_step(trainee, context) for name, trainee in trainees.items()}
        found = measure(group, runners, config, context)
        dense, switch, *_ = found
        for record in found:
            flops = trainees[record["impl"]].flops
            fastest = common.peak_flops(context)
            record["S"] = tokens
            record["tokens_per_second"] = 1e3 * tokens / record["ms"]
            record["mfu"] = 3 * flops * record["tokens_per_second"] / fastest if fastest else None
            record["to_dense"] = record["ms"] / dense["ms"]
            record["to_switch"] = record["ms"] / switch["ms"]
        columns = "impl runs ms spread tokens_per_second mfu peak_mb to_dense to_switch"
        show(found, columns, f"{group}, {tokens} tokens")
        records += found
    return records


class Trainee(NamedTuple):
    net: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor
    flops: float  # forward, of one token


def decoders(size: dict, tokens: int, device: torch.device) -> dict[str, Trainee]:
    """XMoE's models: experts in every second block."""
    ids = torch.randint(size["vocab_size"], (tokens,), device=device).view(-1, size["block_size"])
    trainees, ffn = {}, 4 * size["n_embd"]
    for router, parts in {"dense": 1, "switch": 1, "topk": 8, "threshold": 8}.items():
        config = model.ModelConfig(**size, ffn_size=ffn, router=router, expert_size=ffn // parts)
        net = model.GPT(config).to(device)
        flops = measures.flops_per_token(net, config, head=2 * config.n_embd * config.vocab_size)
        experts = 1 if router == "dense" else 8 * parts
        trainees[f"{router} {experts} x {ffn // parts}"] = Trainee(net, (ids,), ids.flatten(), flops["total"])
    return trainees


def encoders(size: dict, tokens: int, device: torch.device) -> dict[str, Trainee]:
    """X-MoE's models: one sparse layer of 32 experts, half-way; a dense encoder whose FFNs are as much wider."""
    ids = torch.randint(2, size["vocab_size"], (tokens,), device=device).view(-1, size["block_size"])
    masked = torch.randperm(tokens, device=device)[: round(MASKED * tokens)].sort().values
    ffn, layers = 4 * size["n_embd"], size["n_layer"]
    expert = ffn if layers == 12 else ffn // 4  # the demo's experts are smaller
    wider = ffn + 3 * expert // layers
    sparse = dict(ffn_size=ffn, expert_size=expert, moe_after=(layers // 2,))
    options = {
        f"dense, FFN {wider}": dict(ffn_size=wider, router="dense"),
        f"SMoE 32 x 3 x {expert}": dict(sparse, router="switch"),
        f"X-MoE 32 x 3 x {expert}": dict(sparse, router="hypersphere"),
    }
    trainees = {}
    for name, option in options.items():
        config = model.ModelConfig(**size, **option)
        net = model.MaskedLM(config).to(device)
        head = 2 * config.n_embd * (config.n_embd + config.vocab_size)
        flops = measures.flops_per_token(net.encoder, config, head=MASKED * head)
        trainees[name] = Trainee(net, (ids, masked), ids.flatten()[masked], flops["total"])
    return trainees


def make_step(trainee: Trainee, context) -> Callable[[], dict]:
    net = trainee.net
    optimizer = common.adamw(net, ADAMW)
    forward = torch.compile(net, dynamic=False) if context.device.type == "cuda" else net

    def step() -> dict:
        start = clock(context)
        with context.autocast():
            logits, balance = forward(*trainee.inputs)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), trainee.targets) + 0.01 * balance
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        net.after_step()
        return {"ms": clock(context) - start}

    return step


ADAMW = SimpleNamespace(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
MASKED = 0.15  # share of its tokens that an encoder predicts
DEMO = dict(n_head=4, n_layer=4, n_embd=256, block_size=256, vocab_size=VOCABULARY)
PAPER = dict(n_head=12, n_layer=12, n_embd=768, block_size=1024, vocab_size=50_257)
STEPS = {
    "demo": {
        "width 256": (decoders, DEMO),
        "width 768": (decoders, DEMO | dict(n_embd=768)),
        "encoder": (encoders, DEMO | dict(block_size=128)),
    },
    "paper": {
        "width 768": (decoders, PAPER),
        "encoder": (encoders, PAPER | dict(block_size=512, vocab_size=250_002)),
    },
}

# ---------------------------------------------------------------------------------------------------------------------
# python bench.py size


@dataclass
class SizeConfig(Config):
    tokens: int = 65536  # the most


def bench_size(config: SizeConfig, context) -> list[dict]:
    """Tokens at 64 experts of width 128; then ever more and smaller experts, to width 1, at equal FLOPs."""
    D, most = 256, config.tokens
    tokens = sorted({min(most, 2**n) for n in range(10, 17)})
    experts = {8: 1024, 16: 512, 32: 256, 64: 128, 256: 32, 1024: 8, 4096: 1}  # how many, of what width
    groups = {
        "tokens": [(S, 64, 128) for S in tokens],
        "experts": [(min(most, 4096), *size) for size in experts.items()],
    }
    records = []
    for group, sizes in groups.items():
        layers, runners = {}, {}
        for S, E, width in sizes:
            torch.manual_seed(config.seed)
            h = torch.randn(1, S, D, device=context.device)
            ids = torch.zeros(1, S, dtype=torch.int64, device=context.device)
            shape = Shape(D, E, width, "threshold", 1, 4 * D / width)
            name = f"{S} tokens, {E} x {width}"
            layers[name] = our_layer(model, shape, shape.router, h, ids, config.seed)
            runners[name] = partial(layers[name].measure, h, context)
        found = measure(group, runners, config, context)
        for record, (S, E, width) in zip(found, sizes):
            layer, peak = layers[record["impl"]], record["peak_mb"]
            gradients = 4 * measures.numel(layer.module.layers) / 2**20
            record |= {"S": S, "E": E, "F": width}
            record["us_per_token"] = 1e3 * record["ms"] / S
            record["rows_per_token"] = layer.flops / (4 * D * width * S)
            record["kb_per_token"] = None if peak is None else 1024 * (peak - gradients) / S
        columns = "S E F runs ms spread us_per_token rows_per_token peak_mb kb_per_token"
        show(found, columns, f"more {group}, width {D}; kb_per_token is without the weights' gradients")
        records += found
    return records


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py translate


@dataclass
class TranslateConfig(Config):
    tokens: int = 20_000  # of sources and references, of all languages evenly, from the training split
    data: str = "catalogs-en"  # a corpus of pairs under data/prepared, or the folder of a prepared one
    model: str = "out/train_mt/demo"  # a run's folder; where it is missing, random weights, which rarely end early


def bench_translate(config: TranslateConfig, context) -> list[dict]:
    """Beam search without a capacity limit."""
    with common.clear_errors():
        data = TranslationData(ready(config.data), block_size=128, micro_tokens=2048)
        translator = load_translator(config, data).to(context.device)
        tokenizer = data.tokenizer
    batches = list(data.eval_batches("train", config.tokens))
    sentences = sum(len(batch.source) for batch in batches)
    sources = [context.send_all(batch.source, batch.source_real) for batch in batches]
    special = dict(bos=tokenizer.bos, eos=tokenizer.eos, never=tokenizer.unwritten)

    def translate(beam: int, cache: bool) -> dict:
        start = clock(context)
        with context.autocast():
            found = [translator.translate(*source, beam=beam, cache=cache, **special) for source in sources]
        ms = clock(context) - start
        return {"ms": ms, "tokens": sum(len(ids) + 1 for batch in found for ids in batch)}

    records = []
    for beam in (5, 1):
        runners = {"cache": partial(translate, beam, True), "no cache": partial(translate, beam, False)}
        found = measure(f"beam {beam}", runners, config, context)
        for record in found:
            record["sentences_per_second"] = 1e3 * sentences / record["ms"]
            record["tokens_per_second"] = 1e3 * record["tokens"] / record["ms"]
            record["ratio"] = record["ms"] / found[0]["ms"]
        records += found
    weights = config.model if Path(config.model).exists() else "random weights"
    columns = "shape impl runs ms spread tokens sentences_per_second tokens_per_second peak_mb ratio"
    show(records, columns, f"{sentences:,} sentences of {config.data}, {weights}")
    return records


def load_translator(config: TranslateConfig, data: TranslationData) -> Translator:
    """ValueError where the folder holds something else than a translator with the data's vocabulary."""
    if not Path(config.model).exists():
        torch.manual_seed(config.seed)
        size = dict(n_layer=4, decoder_layers=2, n_embd=128, ffn_size=512)
        return Translator(model.ModelConfig(vocab_size=data.vocab_size, **size))
    translator, tokenizer = pretrained.load(config.model)
    if not isinstance(translator, Translator):
        raise ValueError(f"{config.model} is no translator: give --model the folder of a run of train_mt.py")
    if tokenizer.sha256 != data.tokenizer.sha256:
        raise ValueError(f"{config.model} was trained with another vocabulary than that of {data.folder}: give --data")
    return translator


# ---------------------------------------------------------------------------------------------------------------------
# The command line

BENCHES = {
    "layer": (LayerConfig, bench_layer),
    "step": (StepConfig, bench_step),
    "size": (SizeConfig, bench_size),
    "translate": (TranslateConfig, bench_translate),
}


def check(config: Config):
    for name in ("rounds", "patience", "threads", "tokens"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be over 0, not {value}")
    if config.json and not Path(config.json).parent.is_dir():
        raise ValueError(f"--json {config.json}: there is no such folder")


def main():
    what, *options = sys.argv[1:] or [""]
    with common.clear_errors():
        if what not in BENCHES:
            raise ValueError(f"say what to measure: python bench.py {' | '.join(BENCHES)}, each with --help")
        default, bench = BENCHES[what]
        config = runs.parse(default(), options)
        check(config)
        context = common.setup(config.device, config.dtype, config.keep_memory)
    if config.threads:
        torch.set_num_threads(config.threads)
    machine = common.machine(context) | {"cores": os.cpu_count()}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    records = bench(config, context)
    if config.json:
        lines = [json.dumps(record | {"machine": machine}) for record in records]
        Path(config.json).write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
