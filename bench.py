"""Speed and memory of the MoE layer, as ratios to a dense FFN in the same run.

    python bench.py layer                         four shapes, every router, and the peers that are installed
    python bench.py step                          whole training steps at equal FLOPs
    python bench.py size                          how time and memory grow with tokens and with the number of experts
    python bench.py translate                     beam search with a key-value cache, and without
    python bench.py layer --device cuda --dtype bfloat16 --tokens 65536

`ratio` is time over that of a dense FFN with the FLOPs of the rows that are really kept: 1 is a layer that costs
nothing but its arithmetic. All contenders take turns, round by round, in one process; times are medians, `spread` is
half the range between their quartiles. Routers are part of what is timed, as are their gradients; "its products alone"
are no layer, but a bound on what ours can reach. `--help` lists all.
"""

import copy
import dataclasses
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
import typing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import common
from data.prepare import ready
from data.translation import TranslationData, source_batches
from dispatch import expert_capacity, few_at_a_time, products, weight_gradients, within_capacity
from flops import flops_per_token
from model import FFN, GPT, EncoderConfig, MaskedLM, ModelConfig, MoE
from translator import Translator, TranslatorConfig


@dataclasses.dataclass
class Config:
    shapes: str = "S1,S2,S3,S4"  # of `layer`, some of these
    sentences: int = 1000  # of `translate`
    model: str = "out/train_mt/demo/model.pt"  # of `translate`; random weights where it is missing, which never end
    tokens: int | None = None  # S; default: 4096 (layer, size), 4096 (step on a CPU), 16 x 1024 (step on CUDA)
    all_routers: bool = True  # of `layer`: false measures only the one that the shape is about
    peers: bool = True  # of `layer`: other people's layers, where they are installed
    rounds: int = 15  # how often each contender runs
    patience: float = 5.0  # seconds after which a slow contender has run often enough
    seed: int = 0  # of weights and tokens
    threads: int = 0  # of the CPU; 0: as torch chooses
    keep_memory: bool = True  # on a CPU: freed memory stays with the process, as in the training scripts
    device: str = "auto"  # cuda, mps or cpu
    dtype: str = "float32"  # float32, or bfloat16 (autocast)
    json: str | None = None  # file that receives the records


# D, E, F, router, K, gamma: what the shape is about. Logits have a standard deviation of 2.75.
SHAPES = {
    "S1": (256, 8, 1024, "switch", 1, 1.0),
    "S2": (256, 64, 128, "threshold", 8, 8.0),
    "S3": (768, 64, 384, "topk", 8, 8.0),
    "S4": (768, 32, 3072, "switch", 1, 1.0),
}
ROUTERS = ("switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice")
LOGIT_STD = 2.75


def layer_config(D: int, E: int, F: int, router: str, K: int, gamma: float) -> ModelConfig:
    """Of one layer; `hypersphere` is X-MoE's router with the shape's K."""
    options = {"router": router}
    if router == "hypersphere":
        options = {"router": "topk", "score": "hypersphere"}
    if router in ("topk", "hypersphere"):
        options["top_k"] = K
    size = dict(vocab_size=8192, n_embd=D, n_head=4, ffn_size=4 * D, expert_size=F, num_experts=E)
    return ModelConfig(**size, capacity_factor=gamma, **options)


def make_layer(config: ModelConfig, context) -> MoE:
    moe = MoE(config)
    for w in (moe.layers[0].w_in, moe.layers[0].w_out):
        nn.init.normal_(w, std=0.02)
    if config.score == "dot":
        nn.init.normal_(moe.router.experts, std=LOGIT_STD / math.sqrt(config.n_embd))
    return moe.to(context.device)


def kept_counts(moe: MoE, h: Tensor, ids: Tensor) -> list[int]:
    """How many rows each expert keeps."""
    with torch.no_grad():
        routing = moe.router(h.flatten(0, 1), ids.flatten())
        capacity = expert_capacity(h.shape[0] * h.shape[1], moe.router.num_experts, moe.capacity_factor)
        return within_capacity(routing.priority, capacity).sum(dim=0).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Peers: a module and the FLOPs of the rows that it keeps, or None where the peer has no such layer. All with tanh-GELU.

GELU = "gelu_pytorch_tanh"


def mixtral(D, E, F, K, gamma, h, implementation):
    """Hugging Face's Mixtral block: top-k without a capacity, three matrices an expert."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K, hidden_act=GELU
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.normal_(block.gate.weight, std=LOGIT_STD / math.sqrt(D))
    return block, 2 * 3 * D * F * K * h.shape[0] * h.shape[1]


def switch_transformers(D, E, F, K, gamma, h):
    """Hugging Face's Switch layer: top-1 with a capacity, no biases."""
    if K > 1:
        return None
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    S = h.shape[0] * h.shape[1]
    config = SwitchTransformersConfig(
        d_model=D,
        d_ff=F,
        num_experts=E,
        expert_capacity=expert_capacity(S, E, gamma),
        dropout_rate=0.0,
        dense_act_fn=GELU,
        router_jitter_noise=0.0,
    )
    block = SwitchTransformersSparseMLP(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.normal_(block.router.classifier.weight, std=LOGIT_STD / math.sqrt(D))
    with torch.no_grad():
        kept = int(copy.deepcopy(block).to(h.device).router(h)[0].sum())
    return block, 2 * 2 * D * F * kept


def st_moe(D, E, F, K, gamma, h):
    """lucidrains' ST-MoE layer: top-n with a capacity, GEGLU of two thirds the width, dispatch by one-hot einsum."""
    if K == 1:
        return None
    from st_moe_pytorch import MoE as StMoE

    block = StMoE(D, E, expert_hidden_mult=F / D, gating_top_n=K, threshold_train=0.0, capacity_factor_train=gamma)
    nn.init.normal_(block.gate.to_gates.weight, std=LOGIT_STD / math.sqrt(D))
    with torch.no_grad():
        kept = int(copy.deepcopy(block).to(h.device).gate(h)[0].count_nonzero())
    return block, 2 * 3 * D * int(F * 2 / 3) * kept


PEERS = {
    "HF Mixtral, loop": ("transformers", lambda *a: mixtral(*a, "eager")),
    "HF Mixtral, grouped_mm": ("transformers", lambda *a: mixtral(*a, "grouped_mm")),
    "HF Switch": ("transformers", switch_transformers),
    "st-moe-pytorch": ("st_moe_pytorch", st_moe),
}

# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def wait(context):
    if context.device.type == "cuda":
        torch.cuda.synchronize()


@dataclasses.dataclass
class Contender:
    """A layer, how it is called, and the FLOPs of one forward pass over the rows that it keeps."""

    module: nn.Module
    call: typing.Callable  # (module, h) -> output, auxiliary losses if any
    flops: int

    def time(self, h: Tensor, context) -> tuple[float, float]:
        """Seconds forward and backward; the parameters' gradients are made anew, as in training."""
        gradient, h = h, h.detach().requires_grad_()  # any numbers will do for the gradient that comes in
        wait(context)
        start = time.perf_counter()
        with context.autocast():
            y, *extra = self.call(self.module, h)
        wait(context)
        middle = time.perf_counter()
        losses = [loss for loss in extra if loss.requires_grad]
        torch.autograd.backward([y, *losses], [gradient[:, : y.shape[1]].to(y.dtype), *map(torch.ones_like, losses)])
        wait(context)
        end = time.perf_counter()
        self.module.zero_grad(set_to_none=True)
        return middle - start, end - middle


@dataclasses.dataclass
class Products:
    """A layer's matrix products alone, on rows that lie in the cache already: what it cannot do without on a CPU."""

    module: MoE
    counts: list[int]  # the rows of each expert
    flops: int

    def time(self, h: Tensor, context) -> tuple[float, float]:
        """Seconds of the two products forward, and of the four backward."""
        w_in, w_out = (w.detach().to(context.dtype) for w in (self.module.layers[0].w_in, self.module.layers[0].w_out))
        (F, D), dw_in, dw_out = w_in.shape[1:], torch.empty_like(w_in), torch.empty_like(w_out)
        spans, seconds = few_at_a_time(self.counts, max(D, F), torch.get_num_threads()), [0.0, 0.0]
        most = max(rows.stop - rows.start for _, rows, _ in spans)
        x, z = (torch.ones(most, width, dtype=w_in.dtype) for width in (D, F))
        y, a = torch.empty_like(x), torch.empty_like(z)
        for some, rows, runs in spans:
            n = rows.stop - rows.start
            start = time.perf_counter()
            products(runs, x[:n], w_in[some].mT, a[:n])
            products(runs, z[:n], w_out[some].mT, y[:n])
            middle = time.perf_counter()
            products(runs, x[:n], w_out[some], a[:n])
            weight_gradients(runs, x[:n], z[:n], dw_out[some])
            weight_gradients(runs, z[:n], x[:n], dw_in[some])
            products(runs, z[:n], w_in[some], y[:n])
            seconds = [seconds[0] + middle - start, seconds[1] + time.perf_counter() - middle]
        return tuple(seconds)


def peak_memory(run, context) -> float:
    """MB that `run` needs at its peak, beyond what is there before; nan where it cannot be told."""
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:  # Linux: the highest resident size since it was reset
        import ctypes

        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run()
        return (status("VmHWM") - before) / 1024
    except (OSError, AttributeError, TypeError):
        return math.nan


def status(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def take_turns(contenders: dict, config: Config, title: str) -> dict[str, list]:
    """name -> what its function returned, round by round. A slow one drops out once its patience is used up."""
    samples, spent = {name: [] for name in contenders}, dict.fromkeys(contenders, 0.0)
    bar = tqdm(range(config.rounds + 1), desc=title, unit="round", leave=False)
    for turn in bar:
        for name, run in contenders.items():
            if spent[name] > config.patience:
                continue
            start = time.perf_counter()
            sample = run()
            spent[name] += time.perf_counter() - start
            if turn or spent[name] > config.patience:  # the first time is for warming up, unless there is only one
                samples[name].append(sample)
    return samples


def middle_and_spread(values: list[float]) -> tuple[float, float]:
    """Median, and half the range between the quartiles."""
    if len(values) < 2:
        return values[0], math.nan
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


def bench_layer(config: Config, context) -> list[dict]:
    records, S = [], config.tokens or 4096
    for shape in config.shapes.split(","):
        torch.manual_seed(config.seed)
        D, about = SHAPES[shape][0], SHAPES[shape][3]
        h, ids = torch.randn(1, S, D, device=context.device), torch.randint(8192, (1, S), device=context.device)
        layers = contenders(config, SHAPES[shape], h, ids, context)
        samples = take_turns({k: partial(layer.time, h, context) for k, layer in layers.items()}, config, shape)
        dense = statistics.median(sum(pair) for pair in samples["dense"]) / layers["dense"].flops
        found = []
        for name, layer in layers.items():
            ms, spread = middle_and_spread([1e3 * sum(pair) for pair in samples[name]])
            forward, backward = (1e3 * statistics.median(x) for x in zip(*samples[name]))
            record = {"shape": shape, "impl": "ours" if name == f"ours, {about}" else name, "selection": name, "S": S}
            record |= {"dtype": config.dtype, "ms": ms, "spread": spread, "forward_ms": forward}
            record |= {"backward_ms": backward, "peak_mb": peak_memory(partial(layer.time, h, context), context)}
            record |= {"gflops": 3 * layer.flops / 1e9, "ratio": ms / (1e3 * dense * layer.flops)}
            found.append(record | {"runs": len(samples[name])})
        columns = ["selection", "runs", "forward_ms", "backward_ms", "ms", "spread", "peak_mb", "gflops", "ratio"]
        show(found, columns, f"{shape}: S {S}, D, E, F, router, K, gamma = {SHAPES[shape]}")
        records += found
    return records


def contenders(config: Config, shape: tuple, h: Tensor, ids: Tensor, context) -> dict[str, Contender]:
    """The dense FFN of the shape's own kept FLOPs, our layer under every router, and the peers that are installed."""
    D, E, F, about, K, gamma = shape
    layers = {"dense": None}
    for router in [about, *(r for r in ROUTERS if r != about and config.all_routers)]:
        moe = make_layer(layer_config(D, E, F, router, K, gamma), context)
        counts = kept_counts(moe, h, ids)
        layers[f"ours, {router}"] = Contender(moe, lambda moe, x: moe(x, ids), 4 * D * F * sum(counts))
        if router == about and context.device.type == "cpu":
            layers["its products alone"] = Products(moe, counts, 4 * D * F * sum(counts))
    rows = max(1, round(layers[f"ours, {about}"].flops / (16 * D * D)))  # of an FFN of width 4 D
    ffn = FFN(layer_config(D, E, F, about, K, gamma)).to(context.device)
    layers["dense"] = Contender(ffn, lambda ffn, x: (ffn(x[:, :rows]),), 16 * D * D * rows)
    for name, (package, make) in PEERS.items() if config.peers else ():
        if not importlib.util.find_spec(package):
            print(f"{name}: {package} is not installed, skipped")
            continue
        try:
            made = make(D, E, F, K, gamma, h)
        except Exception as error:  # a peer may break in many ways; ours go on
            print(f"{name}: skipped ({type(error).__name__}: {str(error).splitlines()[0]})")
            continue
        if made:
            block, kept_flops = made
            call = (lambda peer, x: peer(x)[:2]) if package == "st_moe_pytorch" else (lambda peer, x: (peer(x),))
            layers[name] = Contender(block.to(context.device).train(), call, kept_flops)
    return layers


def bench_step(config: Config, context) -> list[dict]:
    """Forward, backward, clipping, AdamW: as in the training scripts, on random tokens, at equal active FLOPs."""
    cuda, records = context.device.type == "cuda", []
    paper = dict(n_head=12, n_layer=12, block_size=1024, vocab_size=50257)
    demo = dict(n_head=4, n_layer=4, block_size=256, vocab_size=8192)
    size, widths, T, V = (paper, (768,), 512, 250_002) if cuda else (demo, (256, 768), 128, 8192)
    groups = {f"width {D}": (decoders, size | dict(n_embd=D)) for D in widths}
    groups["encoder"] = encoders, size | dict(n_embd=widths[0], block_size=T, vocab_size=V)
    for shape, (make_models, size) in groups.items():
        tokens, T = config.tokens or (16 * 1024 if cuda else 4096), size["block_size"]
        with common.clear_errors():
            if tokens % T:
                raise ValueError(f"tokens must be a multiple of {T}, the length of a sequence, not {tokens}")
        torch.manual_seed(config.seed)
        ids = torch.randint(2, size["vocab_size"], (tokens,), device=context.device).view(-1, T)
        inputs, targets, predicted = (ids,), ids.flatten(), 1.0
        if make_models is encoders:
            predicted = 0.15
            masked = torch.randperm(tokens, device=context.device)[: round(predicted * tokens)].sort().values
            inputs, targets = (ids, masked), targets[masked]
        steps, flops = {}, {}
        for name, model in make_models(size).items():
            model = model.to(context.device)
            flops[name] = 3 * tokens * flops_per_token(model.config, predicted)["total"]
            steps[name] = make_step(model, inputs, targets, context)
        samples = take_turns(steps, config, shape)
        names = list(steps)
        for name in names:
            ms, spread = middle_and_spread([1e3 * s for s in samples[name]])
            record = {"shape": shape, "impl": name, "S": tokens, "dtype": config.dtype, "ms": ms, "spread": spread}
            record |= {"tokens_per_second": 1e3 * tokens / ms, "peak_mb": peak_memory(steps[name], context)}
            for to, other in (("dense", names[0]), ("switch", names[1])):
                record[f"to_{to}"] = ms / (1e3 * statistics.median(samples[other]))
            fastest = common.peak_flops(context)
            records.append(record | {"mfu": 1e3 * flops[name] / ms / fastest if fastest else math.nan})
        columns = ["impl", "ms", "spread", "tokens_per_second", "mfu", "peak_mb", "to_dense", "to_switch"]
        show(records[-len(names) :], columns, f"{shape}, {tokens} tokens")
    return records


def decoders(size: dict) -> dict[str, GPT]:
    """XMoE's models: experts in every second block."""
    models, ffn = {}, 4 * size["n_embd"]
    for router, split in {"dense": 1, "switch": 1, "topk": 8, "threshold": 8}.items():
        options = {} if router == "dense" else {"expert_size": ffn // split}
        model = GPT(ModelConfig(**size, ffn_size=ffn, router=router, **options))
        models[f"{router} {model.config.num_experts} x {model.config.expert_size}"] = model
    return models


def encoders(size: dict) -> dict[str, MaskedLM]:
    """X-MoE's models: one sparse layer of 32 experts, half-way; a dense encoder whose FFNs are as much wider."""
    ffn = 4 * size["n_embd"]
    expert = ffn if size["n_layer"] == 12 else ffn // 4  # the demo's experts are smaller
    wider = ffn + 3 * expert // size["n_layer"]
    models = {f"dense, FFN {wider}": MaskedLM(EncoderConfig(**size, ffn_size=wider, router="dense"))}
    for name, router in (("SMoE", "switch"), ("X-MoE", "hypersphere")):
        sparse = EncoderConfig(**size, ffn_size=ffn, expert_size=expert, router=router)
        models[f"{name} 32 x 3 x {expert}"] = MaskedLM(sparse)
    return models


def make_step(model: nn.Module, inputs: tuple, targets: Tensor, context):
    optimizer = common.adamw(model, 1e-4, (0.9, 0.95), 0.1)
    forward = torch.compile(model, dynamic=False) if context.device.type == "cuda" else model

    def step() -> float:
        wait(context)
        start = time.perf_counter()
        with context.autocast():
            logits, balance = forward(*inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets) + 0.01 * balance
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.after_step()
        wait(context)
        return time.perf_counter() - start

    return step


def bench_size(config: Config, context) -> list[dict]:
    """Tokens at 64 experts of width 128; then ever more and smaller experts, to width 1, at equal FLOPs."""
    records, most = [], config.tokens or 65536
    runs = [("tokens", S, 64, 128) for S in (1024, 2048, 4096, 8192, 16384, 32768, 65536) if S <= most]
    sizes = ((8, 1024), (16, 512), (32, 256), (64, 128), (256, 32), (1024, 8), (4096, 1))
    runs += [("experts", min(4096, most), E, F) for E, F in sizes]
    D, layers = 256, {}
    for what, S, E, F in runs:
        torch.manual_seed(config.seed)
        moe = make_layer(layer_config(D, E, F, "threshold", 1, 4 * D / F), context)
        h, ids = (
            torch.randn(1, S, D, device=context.device),
            torch.zeros(1, S, dtype=torch.int64, device=context.device),
        )
        contender = Contender(moe, lambda moe, x, ids=ids: moe(x, ids), 4 * D * F * sum(kept_counts(moe, h, ids)))
        layers[what, S, E, F] = partial(contender.time, h, context), contender.flops
    samples = take_turns({key: run for key, (run, _) in layers.items()}, config, "sizes")
    for (what, S, E, F), (run, flops) in layers.items():
        ms, spread = middle_and_spread([1e3 * sum(pair) for pair in samples[what, S, E, F]])
        peak, gradients = peak_memory(run, context), E * (2 * D * F + F + 2 * D) * 4 / 2**20
        record = {"shape": what, "impl": "ours", "dtype": config.dtype, "S": S, "E": E, "F": F, "ms": ms}
        record |= {"spread": spread, "us_per_token": 1e3 * ms / S, "rows_per_token": flops / (4 * D * F * S)}
        records.append(record | {"peak_mb": peak, "kb_per_token": 1024 * (peak - gradients) / S})
    for what in ("tokens", "experts"):
        columns = ["S", "E", "F", "ms", "spread", "us_per_token", "rows_per_token", "peak_mb", "kb_per_token"]
        title = f"more {what}, width {D}; kb_per_token is without the weights' gradients"
        show([r for r in records if r["shape"] == what], columns, title)
    return records


def bench_translate(config: Config, context) -> list[dict]:
    """The demo's sources, of all its languages, by beam search without a capacity limit."""
    records, file = [], Path(config.model)
    with common.clear_errors():
        data = TranslationData(ready("catalogs-en"), block_size=128, micro_tokens=2048)
        state, tokenizer = common.load_checkpoint(file) if file.exists() else None, data.tokenizer
        if state and state["tokenizer"] != tokenizer.sha256:
            raise ValueError(f"{file} was trained with another vocabulary than that of {data.folder}")
    torch.manual_seed(config.seed)
    demo = dict(vocab_size=data.vocab_size, n_layer=4, decoder_layers=2, n_embd=128, ffn_size=512)
    model = Translator(TranslatorConfig(**(state["arguments"] if state else demo))).to(context.device)
    if state:
        model.load_state_dict(state["model"])
    each = -(-config.sentences // len(data.languages))
    pairs = (pair for name in data.languages for pair in itertools.islice(data.raw("train", name), each))
    texts = [source.tolist() for source, _ in pairs][: config.sentences]
    batches = source_batches(texts, tokenizer.pad, tokenizer.eos, 1024)
    batches = [context.send_all(*batch) for _, batch in batches]
    special = dict(bos=tokenizer.bos, eos=tokenizer.eos, never=tokenizer.unwritten)

    def run(beam: int, cache: bool) -> tuple[float, int]:
        """Seconds, and tokens of the translations."""
        wait(context)
        start = time.perf_counter()
        with context.autocast():
            found = [model.translate(*batch, beam=beam, cache=cache, **special) for batch in batches]
        wait(context)
        return time.perf_counter() - start, sum(len(ids) + 1 for some in found for ids in some)

    ways = {(beam, cache): partial(run, beam, cache) for beam in (5, 1) for cache in (True, False)}
    samples = take_turns(ways, config, "translate")
    for (beam, cache), found in samples.items():
        seconds, spread = middle_and_spread([s for s, _ in found])
        record = {"shape": f"beam {beam}", "impl": "cache" if cache else "no cache", "dtype": config.dtype}
        record |= {"runs": len(found), "ms": 1e3 * seconds, "spread": 1e3 * spread, "tokens": found[0][1]}
        record |= {"sentences_per_second": len(texts) / seconds, "tokens_per_second": found[0][1] / seconds}
        records.append(record | {"ratio": seconds / statistics.median(s for s, _ in samples[beam, True])})
    columns = ["shape", "impl", "runs", "ms", "spread", "tokens", "sentences_per_second", "tokens_per_second", "ratio"]
    what = f"{file}, {state['step']}" if state else "random weights"
    show(records, columns, f"{len(texts):,} sentences of {sum(map(len, texts)) / len(texts):.1f} tokens, {what}")
    return records


def show(records: list[dict], columns: list[str], title: str):
    def text(value):
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
        return str(value)

    print(
        f"\n{title}\n\n{common.markdown_table(columns, [[text(r[c]) for c in columns] for r in records])}", flush=True
    )


BENCHES = {"layer": bench_layer, "step": bench_step, "size": bench_size, "translate": bench_translate}


def main():
    with common.clear_errors():
        what = sys.argv[1] if len(sys.argv) > 1 else ""
        given = common.parse(Config, sys.argv[2:] if what in BENCHES else sys.argv[1:])
        if what not in BENCHES:
            raise ValueError(f"say what to measure: python bench.py {' | '.join(BENCHES)}")
        config = Config(**given)
        for shape in config.shapes.split(","):
            if shape not in SHAPES:
                raise ValueError(f"unknown shape {shape!r}{common.nearest(shape, SHAPES)}")
        if min(config.rounds, config.tokens or 1, config.sentences) < 1:
            raise ValueError("rounds, tokens and sentences must be positive")
        context = common.setup(config.device, config.dtype, config.keep_memory)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    machine = common.machine(context) | {"cores": os.cpu_count()}
    print(", ".join(f"{k} {v}" for k, v in machine.items()))
    records = BENCHES[what](config, context)
    if config.json:
        common.write_atomic(Path(config.json), json.dumps([r | {"machine": machine} for r in records], indent=1))


if __name__ == "__main__":
    main()
