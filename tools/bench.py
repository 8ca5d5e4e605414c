"""How fast this code is, and whether a GPU computes what a CPU does: in three parts, on whatever device there is.

    python tools/bench.py layer     one sparse layer, under every router, beside dense FFNs and Hugging Face's Mixtral
    python tools/bench.py step      training steps of whole models; on a GPU they have the paper's size
    python tools/bench.py check     layers here against the CPU's, and a training that is stopped and goes on

Contenders take turns, round by round. `ms` is the median of one's times, and `spread` half the range between their
quartiles. The `ratio` of a layer, router included, is its time over that of a dense FFN with the FLOPs of the rows that
the experts really keep: 1 is a layer that costs nothing but its arithmetic. `least_mb` must be read and written at
least; `operations` have the largest shares of the time. On a GPU `peak_mb` is the memory beyond what is kept between
runs, and `host_waits` counts, by file and line, how often the host waits for the GPU. What a section finds is written
at once into results/gpu/CARD-PART.json, without a GPU into out/bench. A GPU's file is welcome, whatever it says.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler keeps silent

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the project's modules are

import model
import train_lm
import train_mlm
from analysis import flops, measures
from engine import parallel
from engine.device import Context, clear_errors, fail, setup
from engine.files import write
from engine.optim import adamw, cross_entropy
from engine.table import markdown_table
from routers import ROUTERS

ROOT = Path(model.__file__).parent
VOCABULARY = 8192
PATIENCE = 5.0  # seconds, after which a slow contender has run often enough
Contender = tuple[Callable[[], None], dict]  # does its work once; what its record says that needs no measuring


@dataclass
class Config:
    part: tyro.conf.Positional[Literal["layer", "step", "check"]]
    tokens: int = 16_384 if torch.cuda.is_available() else 4096  # of a forward pass
    rounds: int = 15  # how often each contender runs, after a first time for warming up
    only: str = ""  # what the names of the sections to run begin with
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast; check: always
    limit: float = 540.0  # seconds, after which no section begins
    out: Path | None = None  # file that receives the results


def measure(makers: dict[str, Callable[[], Contender]], config: Config, context) -> list[dict]:
    """A record of each: the median of its times and their spread, its facts, and what else is seen of a run."""
    runs, facts, records = {}, {}, []
    for name, make in makers.items():
        try:
            run, facts[name] = make()
            run()
            runs[name] = run
        except Exception as error:  # there may be no compiler, no such library, or one that has changed
            if not re.search("HF|compiled", name):
                raise
            context.say(f"{name}: skipped ({type(error).__name__}: {error})")
    times = measures.in_turns(runs, context, config.rounds, PATIENCE)
    quartiles = torch.tensor([0.25, 0.5, 0.75])
    for name, run in runs.items():
        lower, ms, upper = torch.tensor(times[name]).quantile(quartiles).tolist()
        record = {"impl": name, "ms": ms, "spread": (upper - lower) / 2, "runs": len(times[name])} | facts[name]
        first = records[0] if records else record
        record["ratio"] = ms / record["gflops"] * first["gflops"] / first["ms"]
        if context.peak_flops:
            record["mfu"] = 1e12 * record["gflops"] / ms / context.peak_flops
        records.append(record | seen(run, context))
    return records


def seen(run: Callable, context) -> dict:
    """What one more run shows: the operations with most of the time; on a GPU also memory, and where the host waits."""
    on_gpu = context.device.type == "cuda"
    set_mode = torch.cuda.set_sync_debug_mode if on_gpu else str
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with warnings.catch_warnings(record=True) as caught, torch.profiler.profile() as profile:
        warnings.simplefilter("always")
        set_mode("warn")
        run()
        set_mode("default")
        measures.clock(context)  # when the device has done all
    own_time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = Counter({event.key: getattr(event, own_time) for event in profile.key_averages()})
    shares = [f"{name} {own / max(1, times.total()):.0%}" for name, own in times.most_common(6)]
    facts = {"operations": ", ".join(shares).replace("aten::", "")}
    if on_gpu:
        waits = [warning for warning in caught if "called a synchroniz" in str(warning.message)]
        facts["host_waits"] = Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits)
        facts["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return facts


# ---------------------------------------------------------------------------------------------------------------------
# layer: what does it cost?

SMALL = train_lm.Config(n_embd=256, ffn_size=1024, threshold=0.9)
LARGE = replace(SMALL, n_embd=768, ffn_size=3072)
SHAPES = {
    "S1": replace(SMALL, router="switch", split=1),  # 8 experts of width 1024
    "S2": replace(SMALL, router="threshold", split=8),  # 64 of 128
    "S3": replace(LARGE, router="topk", split=8),  # 64 of 384
    "S4": replace(LARGE, router="switch", split=1, expert_ffns=32),  # 32 of 3072
}
LOGIT_STD = 2.75  # of what a router says of a token, so that it has preferences as a trained one has


def whole_layers(shape: train_lm.Config, config: Config, context) -> list[dict]:
    """Forward and backward passes of dense FFNs of a layer's FLOPs, of ours under its router and others, of Mixtral's.

    "no limit" chooses as Mixtral does. Under the demo's threshold, 0.3, a token keeps one or two experts.
    """
    torch.manual_seed(0)
    h = torch.randn(1, config.tokens, shape.n_embd).to(context.device)
    ours = partial(our_layer, shape, h, context)
    _, facts = ours()
    dense = partial(dense_layer, h, facts["gflops"], context)
    makers = {"dense": dense, "dense, compiled": partial(dense, compiled=True), "ours": ours}
    makers["HF Mixtral, grouped_mm"] = partial(mixtral, shape, h, context)
    variants = {router: {"router": router} for router in ROUTERS if router != shape.router}
    variants["threshold 0.3"] = {"router": "threshold", "threshold": 0.3}
    variants["no limit"] = {"router": "topk", "capacity": math.inf}
    for name, changes in variants.items():
        makers[f"ours, {name}"] = partial(our_layer, replace(shape, **changes), h, context)
    if context.device.type == "cuda":
        makers["ours, compiled"] = partial(ours, compiled=True)
    if context.dtype == torch.bfloat16:
        makers["ours, weights in bfloat16"] = partial(ours, cast=True)
    return measure(makers, config, context)


def layer(module: nn.Module, h: Tensor, gflops: float, context, *more: Tensor, compiled: bool = False) -> Contender:
    """A forward and a backward pass: h (1, S, D) and more -> output, and with more a balance loss.

    gflops: of the forward pass.
    """
    call = parallel.compiled(module) if compiled else module

    def run():
        x = h.detach().requires_grad_()
        with context.autocast():
            y = call(x, *more)
        y = sum(y) if more else y
        y.backward(h.to(y.dtype))  # any gradient will do
        module.zero_grad()  # gradients are made anew, as in training

    # Weights are read twice, and their gradients written; tokens pass in and out, both ways.
    numbers = 3 * flops.numel(module) + 4 * h.numel()
    facts = {"S": h.shape[1], "gflops": 3 * gflops, "least_mb": 1e-6 * context.dtype.itemsize * numbers}
    return run, facts


def our_layer(shape: train_lm.Config, h: Tensor, context, compiled: bool = False, cast: bool = False) -> Contender:
    """With random weights. cast: those of the experts have the type of the products once and for all."""
    torch.manual_seed(1)  # other than the tokens' seed
    constants = replace(shape, router_std=LOGIT_STD / math.sqrt(shape.n_embd))
    moe = model.in_place_of_ffn(constants, VOCABULARY, "tanh").to(h.device)
    for p in moe.experts.parameters():
        nn.init.normal_(p, std=0.02)
    if cast:
        moe.experts.to(context.dtype)
    ids = torch.randint(VOCABULARY, h.shape[:2]).to(h.device)
    stats = measures.RoutingStats(moe)
    with torch.no_grad(), context.autocast():
        moe(h, ids)
    rows = stats.finish()["served"]  # per token
    gflops = 1e-9 * flops.row_flops(moe) * rows * h.shape[1]
    run, facts = layer(moe, h, gflops, context, ids, compiled=compiled)
    return run, facts | {"rows_per_token": rows}


def dense_layer(h: Tensor, gflops: float, context, compiled: bool = False) -> Contender:
    """An FFN of width 4 D on as many of the tokens as make these FLOPs."""
    D = h.shape[2]
    each = 16e-9 * D**2  # GFLOPs of a token, forward
    S = max(1, round(gflops / 3 / each))
    ffn = model.FFN(train_lm.Config(n_embd=D, ffn_size=4 * D), "tanh").to(h.device)
    return layer(ffn, h[:, :S], S * each, context, compiled=compiled)


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
    nn.init.normal_(block.gate.weight, std=LOGIT_STD / math.sqrt(D))
    block.to(h.device, context.dtype)
    return layer(block, h.to(context.dtype), 6e-9 * D * width * K * h.shape[1], context)


# ---------------------------------------------------------------------------------------------------------------------
# step: how fast does it train?


def training_steps(preset: str, config: Config, context, **changes) -> list[dict]:
    """XMoE's models, at equal FLOPs: dense, or with whole FFNs as experts, or with eighths of them."""
    base = train_lm.Config(**train_lm.PRESETS[preset] | changes)
    makers = {}
    for router, split in {"dense": None, "switch": 1, "topk": 8, "threshold": 8}.items():
        constants = replace(base, router=router, split=split)
        makers[router] = partial(trainee, constants, config.tokens, context)
    records = measure(makers, config, context)
    return [record | {"steps_per_second": 1e3 / record["ms"]} for record in records]


def trainee(constants: train_lm.Config, tokens: int, context) -> Contender:
    """Training steps, each micro-batch of about so many random tokens."""
    torch.manual_seed(0)
    V = 50_257 if context.device.type == "cuda" else VOCABULARY
    micros = constants.batch_tokens // constants.micro_tokens
    ids = torch.randint(V, (max(1, tokens // constants.block_size), constants.block_size)).to(context.device)
    net = model.GPT(constants, V).to(context.device)
    forward = parallel.wrap(net, constants, context)
    optimizer = adamw(net, constants)

    def run():
        for _ in range(micros):
            with context.autocast():
                logits, balance = forward(ids)
                loss = cross_entropy(logits.flatten(0, 1), ids.flatten())
            ((loss + constants.balance_coef * balance) / micros).backward()
        parallel.clip_grad_norm_(net, constants.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        net.after_step()

    S = micros * ids.numel()
    work = flops.flops_per_token(net, constants, head=2 * constants.n_embd * V)
    return run, {"S": S, "gflops": 3e-9 * S * work}


# ---------------------------------------------------------------------------------------------------------------------
# check: is it right?

CPU = Context(0, 1, torch.device("cpu"), torch.float32)


def outcome(module: nn.Module, given: tuple[Tensor, ...], context) -> dict[str, Tensor]:
    """What a module makes of given tensors, and gradients of the sum of its squares: by them and by the parameters.

    What the allocator has free is NaN before, so that it shows where memory is read that nobody wrote.
    """
    module.to(context.device).zero_grad()
    given = [x.to(context.device, copy=True).requires_grad_(x.is_floating_point()) for x in given]
    sizes = [1 << 27, *64 * [1 << 18]] if context.device.type == "cuda" else []
    blocks = [torch.full([size], math.nan, device=context.device) for size in sizes]
    del blocks
    with context.autocast():
        outputs = [y for y in module(*given) if torch.is_tensor(y) and y.requires_grad]
    sum(y.float().square().sum() for y in outputs).backward()
    found = {f"output {n}": y for n, y in enumerate(outputs)} | {f"input {n}": x.grad for n, x in enumerate(given)}
    found |= {name.removeprefix("_orig_mod."): p.grad for name, p in module.named_parameters()}
    return {name: x.detach().cpu().double() for name, x in found.items() if x is not None}


def judge(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> dict:
    """Compares tensors of the same names: |x - y| / |y| of each must be under the limit."""
    errors = {name: float(torch.dist(found[name], y) / (y.norm() + 1e-12)) for name, y in expected.items()}
    wrong = [name for name in errors if not errors[name] < limit]  # NaN is wrong, too
    worst = max(wrong or errors, key=errors.get)
    return {"right": not wrong, "error": errors[worst], "of": worst}


def against_the_cpu(router: str, config: Config, context, E: int = 16) -> Iterator[dict]:
    """A layer here, in bfloat16, against the same on the CPU in float32.

    Crowded: nearly all tokens want the same two experts, and others stay empty, where the router lets them.
    """
    tokens, D = 512, 64
    for gamma, layers, crowded in itertools.product((2.0, 0.5, E), (0, 2), (False, True)):
        torch.manual_seed(0)
        size = {"n_embd": D, "experts": E, "expert_size": 32, "expert_layers": layers, "top_k": 2}
        moe = model.between_layers(train_mlm.Config(router=router, capacity_factor=gamma, **size), tokens, "tanh")
        for p in moe.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.2)
        h, ids = torch.randn(1, tokens, D), torch.arange(tokens).unsqueeze(0)
        if crowded:
            h, ids = h + 0.5, ids % 2
        if crowded and hasattr(moe.router, "experts"):  # they stand against what all tokens share
            moe.router.experts.data[2:] -= 0.5 * moe.router.project(torch.ones(D)).detach()
        choices = []
        moe.watchers = [lambda moe, h, routing, kept, choices=choices: choices.append(kept.cpu())]
        expected, found = [outcome(moe, (h, ids), where) for where in (CPU, context)]
        same = torch.equal(*choices)  # scores that are equal but for rounding may change places
        facts = {"gamma": gamma, "stack": layers, "crowded": crowded, "same choices": same}
        yield facts | judge(found, expected, 0.03 if same else 0.3)


def other_parts(config: Config, context) -> Iterator[dict]:
    """XLM-E's attention, in texts of several lengths; a router, compiled as in training, against the eager one here."""
    torch.manual_seed(0)
    B, T, H = 8, 256, 4
    own = model.SelfAttention(train_lm.Config(n_embd=64 * H, n_head=H), causal=False, dropout=0.0, biased=True)
    nn.init.normal_(own.gate)
    real = torch.arange(T) < (T - torch.arange(B) % (T // 2)).view(B, 1, 1, 1)
    given = torch.randn(B, T, 64 * H), real, torch.randn(H, T, T)
    expected, found = [outcome(own, given, where) for where in (CPU, context)]
    yield {"what": "attention"} | judge(found, expected, 0.03)
    router = ROUTERS["threshold"](train_lm.Config(n_embd=64), E=32)
    h = torch.randn(4096, 64)
    expected, found = [outcome(each, (h,), context) for each in (router, parallel.compiled(router))]
    yield {"what": "compiled router"} | judge(found, expected, 3e-4)  # gradients in bfloat16 would differ by 2e-3


RESUMED = "--n_layer 2 --n_embd 64 --ffn_size 256 --steps 40 --eval_every 20 --eval_tokens 2048 --dtype bfloat16"


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
    yield {"right": right, "exits": exits, "output": second.stdout.splitlines()[-30:]}


def sections_of(part: str, gpu: bool) -> dict[str, Callable[[Config, Context], Iterator[dict]]]:
    if part == "layer":
        return {name: partial(whole_layers, shape) for name, shape in SHAPES.items()}
    if part == "step" and gpu:
        large = partial(training_steps, "openwebtext-323M")
        return {"323M, eager": partial(large, compile=False), "323M, compiled": partial(large, compile=True)}
    if part == "step":
        small = partial(training_steps, "small", dropout=0.0)
        return {"width 256": small, "width 768": partial(small, n_embd=768, ffn_size=3072)}
    found = {name: partial(against_the_cpu, name) for name in ROUTERS}
    found["many experts"] = partial(against_the_cpu, "topk", E=1024)  # CUDA's grouped_mm takes fewer groups than that
    return found | {"other parts": other_parts, "train_lm.py": stopped_and_resumed}


def run(sections: dict[str, Callable], file: Path, config: Config, context) -> list[dict]:
    """Writes and prints what each section finds, until time is up. An error is a result, too."""
    start, results = time.perf_counter(), []
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty")
    for name, section in sections.items():
        rows = []
        try:
            late = time.perf_counter() - start > config.limit
            rows.extend([{"stopped": "time is up"}] if late else section(config, context))
        except Exception as error:
            rows.append({"right": False, "error": repr(error), "traceback": traceback.format_exc().splitlines()})
        results += [{"section": name} | row | {"machine": context.machine | {"commit": commit}} for row in rows]
        lines = ",\n".join(map(json.dumps, results))
        write(file, f"[\n{lines}\n]\n")
        columns = [*rows[-1]]
        cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
        context.say(f"\n{name}, {time.perf_counter() - start:.0f} s\n{markdown_table(columns, cells)}")
    return results


def cell(value) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value!s:.80}"


def main():
    config = tyro.cli(Config, description=__doc__, use_underscores=True)
    with clear_errors():
        context = setup(dtype="bfloat16" if config.part == "check" else config.dtype)
    gpu = context.device.type == "cuda"
    every = sections_of(config.part, gpu)
    sections = {name: section for name, section in every.items() if name.startswith(config.only)}
    if not sections:
        fail(f"no section of {config.part} begins with {config.only!r}: there are {', '.join(every)}")
    device = re.sub("[^A-Za-z0-9]+", "-", context.machine["device"])
    file = config.out or ROOT / ("results/gpu" if gpu else "out/bench") / f"{device}-{config.part}.json"
    results = run(sections, file, config, context)
    wrong = dict.fromkeys(result["section"] for result in results if not result.get("right", True))
    context.say(f"\n{len(results)} results are in {file}; wrong or failed: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
