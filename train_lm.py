"""XMoE's language models (tables 1 and 2): a GPT with 8 * split small experts in place of every second FFN.

    python train_lm.py                                     the demo: threshold router, text from your own disk
    python train_lm.py --router switch --capacity 0.5      an ablation, in a separate folder under out/
    python train_lm.py --split 8                           smaller experts: 64 of them
    python train_lm.py --table 1 --seeds 3                 every row of a table, next to the paper's numbers
    python train_lm.py --eval_only true --eval_threshold 0.5                  test a trained model with other routing
    python train_lm.py --eval_only true --init_from RUN --data my.txt         test a run with any other constants
    python train_lm.py --prompt "Return the" --sample_seed 1                  sample from a trained model
    torchrun --nproc_per_node 8 train_lm.py --preset openwebtext-323M         the paper's size, on 8 GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 train_lm.py --preset ...

Each evaluation prints bits per byte, perplexity, and how each MoE layer routes. A run ends with test perplexity, with
the evaluation's capacity limit (the paper's protocol) and without one, and a sample. It lives in out/train_lm/NAME;
the same command resumes it. `--help` lists all constants.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch

from data.batches import TokenData
from data.files import progress
from engine import parallel, pretrained
from engine.device import clear_errors, seed_all, show
from engine.files import differing, newest, read_json
from engine.optim import adamw, clip_gradients, cosine, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from metrics import bits_per_byte, counting, flops, perplexity
from metrics.routing import RoutingStats, describe_routing, losses_in_words, mean_over_layers
from model import GPT

# ---------------------------------------------------------------------------------------------------------------------
# Constants: edit one here, or pass --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, small, or wikitext103 / openwebtext at -124M, -323M or -556M
    table: int | None = None  # run every row of XMoE's table 1 or 2 at the preset's scale
    seeds: int = 1  # train this many seeds and report mean and standard deviation
    data: str = "pydocs"  # your own text (a file or a folder), a corpus under data/prepared, or a prepared folder
    seed: int = 0  # seed of weights, data order and dropout
    # the model
    n_layer: int = 4  # number of blocks
    n_head: int = 4  # number of attention heads (H)
    n_embd: int = 128  # width of the model (D)
    ffn_size: int = 512  # inner width of a dense FFN
    block_size: int = 256  # longest sequence in tokens (T)
    dropout: float = 0.0  # dropout of embeddings, attention weights, attention and FFN
    init_std: float = 0.03  # standard deviation of initial weights
    frequency_bias: bool = True  # add an output bias, initialized to the log frequencies of the training tokens
    # experts
    router: str = "threshold"  # dense, a name in routers.ROUTERS, or FILE.py:NAME
    score: Literal["dot", "hypersphere"] | None = None  # token-expert similarity; None: the router's default
    gate: Literal["softmax", "sigmoid"] | None = None  # weight of a chosen expert; None: the router's default
    moe_every: int = 2  # every N-th block has experts instead of an FFN
    expert_ffns: int = 8  # a sparse layer has the parameters of this many dense FFNs
    split: int | None = None  # parts of a split FFN: expert_ffns * split experts (eq. 6); None: the router's default
    top_k: int | None = None  # experts that topk chooses per token (K); None: `split`, for equal FLOPs
    capacity: float = 1.0  # compute of the experts relative to a dense FFN; the paper's gamma is capacity * split
    eval_capacity: float | None = None  # capacity at test; None: the same
    threshold: float = 0.3  # the chosen experts' probabilities must sum to this t (eq. 5); the paper: 0.9
    eval_threshold: float | None = None  # threshold at test; None: the same
    routing_dim: int | None = None  # dimension that routers project to (d_e); 0: none; None: E / 2 on a hypersphere
    init_temperature: float | None = None  # initial temperature tau_0 on a hypersphere; None: the paper's for the gate
    router_std: float = 0.1  # standard deviation of initial router weights
    balance_coef: float = 0.01  # weight of the balance loss (alpha, eq. 7)
    # training
    steps: int = 1400  # optimizer steps
    batch_tokens: int = 1024  # tokens per step, over all processes and micro-batches
    micro_tokens: int = 1024  # tokens per forward pass; changes results under a capacity limit
    learning_rate: float = 3e-3  # learning rate at the end of the warm-up, its peak
    min_learning_rate: float = 3e-5  # learning rate at the last step, where the cosine decay ends
    warmup: float = 0.1  # share of steps for linear warm-up
    beta2: float = 0.999  # Adam's beta2 (decay of squared gradients); high, since tokens are rare in small batches
    eps: float = 1e-8  # Adam's epsilon, added to the denominator of its update
    weight_decay: float = 0.1  # weight decay of matrices and embeddings
    grad_clip: float = 1.0  # clip the gradient to this norm; 0: no clipping
    eval_every: int = 350  # evaluate and save a checkpoint every N steps
    eval_tokens: int = 32768  # validation tokens per evaluation
    log_every: int = 10  # report the training loss every N steps
    # a sample of the trained model
    prompt: str = ""  # text to continue
    sample_tokens: int = 120  # length of the sample in tokens, at most
    sample_temperature: float = 0.8  # softmax temperature of the sample
    sample_top_k: int = 50  # sample from this many of the most probable tokens
    sample_seed: int = 0  # seed of the sample
    # where and how
    out_dir: str = "out/train_lm"  # folder of all runs
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; None: for bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: saves memory at the cost of a second forward pass
    resume: bool = True  # resume from the newest checkpoint; false: start over
    eval_only: bool = False  # do not train: evaluate the run's checkpoint, or --init_from
    init_from: str | None = None  # start from another run's folder, or from GPT-2 in Hugging Face format (router dense)


# XMoE 4.1 and 4.2; the authors' runs take 256 sequences of 1,024 tokens per step, in micro-batches of 16.
PAPER = dict(n_layer=12, block_size=1024, dropout=0.1, frequency_bias=False, threshold=0.9)
PAPER |= dict(init_std=0.014, router_std=0.014)
PAPER |= dict(batch_tokens=256 * 1024, micro_tokens=16 * 1024)
PAPER |= dict(learning_rate=4.5e-4, min_learning_rate=4.5e-6, beta2=0.95)
PAPER |= dict(eval_every=500, eval_tokens=1 << 20)
BASE = PAPER | dict(n_head=12, n_embd=768, ffn_size=3072)
WIDE = PAPER | dict(n_head=16, n_embd=1024, ffn_size=4096)
PRESETS = {
    "demo": {},
    # half an hour on one core
    "small": dict(n_embd=256, ffn_size=1024, threshold=0.9, dropout=0.1, steps=5000, eval_every=1000),
    "wikitext103-124M": BASE | dict(data="wikitext103", steps=4_000, router="dense"),
    "wikitext103-323M": BASE | dict(data="wikitext103", steps=4_000),
    "wikitext103-556M": WIDE | dict(data="wikitext103", steps=4_000),
    "openwebtext-124M": BASE | dict(data="openwebtext", steps=60_000, router="dense"),
    "openwebtext-323M": BASE | dict(data="openwebtext", steps=60_000),
    "openwebtext-556M": WIDE | dict(data="openwebtext", steps=60_000),
}

# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows, and the paper's test perplexity on OpenWebText and WikiText-103

TABLE1 = [  # method, split, the row's constants, the paper at 323M, at 556M
    ("dense", 1, dict(router="dense"), "22.61", "22.24", "", ""),  # 124M; the paper has no dense model as wide as 556M
    ("Switch", 1, dict(router="switch"), "20.11", "20.60", "19.17", "19.72"),
    ("Hash", 1, dict(router="hash"), "21.27", "21.63", "20.25", "22.01"),
    ("BASE", 1, dict(router="base"), "20.49", "21.13", "19.72", "21.03"),
    ("top-2", 2, dict(router="topk", split=2), "19.81", "20.24", "18.94", "19.47"),
    ("top-4", 4, dict(router="topk"), "19.75", "20.14", "18.94", "19.36"),
    ("top-8", 8, dict(router="topk", split=8), "19.79", "20.10", "18.99", "19.15"),
    ("XMoE", 2, dict(router="threshold", threshold=0.9, split=2), "19.57", "20.16", "18.72", "19.41"),
    ("XMoE", 4, dict(router="threshold", threshold=0.9), "19.49", "20.00", "18.68", "19.26"),
    ("XMoE", 8, dict(router="threshold", threshold=0.9, split=8), "19.46", "19.97", "18.72", "19.10"),
]
TABLE2 = [  # experts, FLOPs at test, the paper's numbers
    (8, 1.00, "22.89", "21.93"),
    (8, 0.75, "22.89", "21.93"),
    (8, 0.50, "22.90", "21.93"),
    (8, 0.25, "23.07", "21.97"),
    (16, 1.00, "22.94", "21.92"),
    (16, 0.75, "22.97", "21.92"),
    (16, 0.50, "23.02", "21.92"),
    (16, 0.25, "23.27", "21.93"),
]


def table1(base: Config) -> Table:
    """The paper's routers, with equal expert parameters and FLOPs; at the paper's size, without BASE."""
    rows, methods, title = [], TABLE1, "XMoE table 1: test perplexity of every router at equal FLOPs"
    if base.preset not in ("demo", "small"):
        methods = [row for row in TABLE1 if row[0] != "BASE"]
        title += " (without BASE, whose auction takes 0.7 s per layer on a GPU: --router base trains it)"
    for method, split, change, *paper in methods:
        experts = 1 if method == "dense" else base.expert_ffns * split
        perplexities = paper[2:] if base.preset.endswith("556M") else paper[:2]
        rows.append(((method, f"{experts} x {base.ffn_size // split}", *perplexities), change))
    return Table(title, ("method", "experts", "paper, OWT", "paper, WT103"), rows)


def table2(base: Config) -> Table:
    """A dense model whose FFNs are split into experts, trained with t = 1 and no drops; at test t = 0.9 saves FLOPs."""
    paper = TABLE1[0][3:5]  # the dense model's
    rows = [(("dense", "", "1.00x", *paper), {"router": "dense"})]
    for experts, work, *paper in TABLE2:
        change = dict(router="threshold", moe_every=1, threshold=1.0, expert_ffns=1, split=experts)
        if work < 1:  # tests the model of the 1.00x row
            change |= dict(eval_only=True, eval_threshold=0.9, eval_capacity=work)
        rows.append((("XMoE", f"{experts} x {base.ffn_size // experts}", f"{work:.2f}x", *paper), change))
    title = "XMoE table 2: test perplexity of dense models split into experts, with fewer FLOPs at test"
    return Table(title, ("method", "experts", "FLOPs", "paper, OWT", "paper, WT103"), rows)


TABLES = {1: table1, 2: table2}
ROUTING = {"wanted": ".2f", "served": ".2f", "cut": ".1%", "unserved": ".2%"}


def cells(result: dict) -> dict:
    """A row of either table; routing statistics are means over MoE layers."""
    test, layers = result["test"], result["test"]["layers"]
    row = {
        "params, M": (result["parameters"]["total"] / 1e6, ".1f"),
        "bits/byte": (test["bpb"], ".3f"),
        "perplexity": (test["ppl"], ".2f"),
        "no limit": (result["test_no_limit"]["ppl"], ".2f"),
    }
    for name, form in ROUTING.items():
        row[name] = mean_over_layers(name, layers), form
    work = result.get("flops_served")  # older results lack it
    return row | {"MFLOPs served": (work and work / 1e6, ".2f")}


# ---------------------------------------------------------------------------------------------------------------------
# One run


@torch.no_grad()
def evaluate(model: GPT, data: TokenData, split: str, context, max_tokens: int | None = None) -> dict:
    """Cross entropy and routing statistics, with micro-batches as large as in training."""
    model.eval()
    watches = [RoutingStats(moe) for moe in model.moe_layers]
    sums = torch.zeros(2, dtype=torch.float64)  # cross entropy, tokens
    batches = data.eval_batches(split, max_tokens, context.rank, context.world)
    for number, (x, y) in enumerate(progress(batches, "evaluating")):
        micro = context.rank + number * context.world
        seed_all(model.config.seed, 0, 1 + micro)  # for routers that sample
        x, y = context.send_all(x, y)
        with context.autocast():
            loss, _ = model(x, y)
        sums += y.numel() * torch.tensor([float(loss), 1.0], dtype=torch.float64)
    loss, tokens = context.sum(sums).tolist()
    model.train()
    scores = {"tokens": int(tokens), "layers": [watch.finish(context.gather) for watch in watches]}
    return in_units(loss / tokens, data.eval_counts(split, max_tokens)) | scores


def in_units(loss: float, counts: dict) -> dict[str, float]:
    """Converts a mean cross entropy in nats per token, given the text's counts of tokens, words and bytes."""
    return {
        "loss": loss,
        "ppl": perplexity(loss),
        "word_ppl": perplexity(loss * counts["tokens"] / counts["words"]) if "words" in counts else None,
        "bpb": bits_per_byte(loss, counts),
    }


def build(config: Config, data: TokenData, context) -> GPT:
    """A new model, initialized with the weights of `--init_from` if given."""
    seed_all(config.seed)
    model = context.place(GPT(config, data.vocab_size))
    if config.frequency_bias:
        model.bias.data.copy_(data.log_frequencies())
    if config.init_from:
        sizes, weights = pretrained.weights_of(config.init_from, "GPT", data.tokenizer.sha256)
        pretrained.fill(model, sizes, weights, config.init_from)
    return model


def train(config: Config, context) -> dict:
    """Trains a language model, or resumes training -> the content of result.json."""
    if config.eval_only:
        return evaluate_run(config, context)
    with clear_errors():
        data = TokenData.open(config.data, config, context)
        run = Run(config, PRESETS, context, data)
        if run.result:
            return run.result
        model = build(config, data, context)
        work = forward_flops(model)
        size = "{total:,} parameters, {active:,.0f} active per token".format(**flops.count_parameters(model))
        if config.prompt:
            context.say("the prompt is continued after the training, which is not finished")
        context.say(f"{run.name}: {size}; {work / 1e6:.1f} forward MFLOPs per token at full capacity")
        counting_losses = counting.text_losses(data, config.steps)
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        counts = data.meta["splits"]["train"]
        run.resume(model, optimizer, work, lambda loss: LOSS.format(**in_units(loss, counts)))

    for step in run.steps():
        peak, floor = config.learning_rate, config.min_learning_rate
        set_learning_rate(optimizer, cosine(step, config.steps, config.warmup, peak, floor))
        for micro in run.micros:
            seed_all(config.seed, 1 + step, micro)  # so a resumed run equals an uninterrupted one
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP averages gradients once per step
            x, y = context.send_all(*data.batch("train", step, micro))
            with context.autocast():
                loss, router_loss = forward(x, y)
            ((loss + router_loss) / len(run.micros)).backward()
            run.add(loss / len(run.micros), tokens=x.numel())
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step(context.sum)  # routers update their state, such as norms on a hypersphere
        if run.due(step + 1):
            scores = evaluate(model, data, "valid", context, config.eval_tokens)
            run.save(step + 1, scores, f"valid {describe(scores)}", scores["loss"])

    text = data.meta["splits"]["test"]
    result = test(model, data, context)
    result["counting"] = {name: bits_per_byte(loss, text) for name, loss in counting_losses.items()}
    return run.finish(result)


def forward_flops(model: GPT) -> float:
    """Forward FLOPs per token at full capacity."""
    return flops.flops_per_token(model, model.config, 2 * model.config.n_embd * model.vocab_size)


def test(model: GPT, data: TokenData, context) -> dict:
    """Test scores with the evaluation's capacity limit (the paper's protocol) and without a limit; the model's size."""
    scores = unlimited = evaluate(model, data, "test", context)
    if model.limited_at_test:
        with model.no_limit():
            unlimited = evaluate(model, data, "test", context)
    work = forward_flops(model)
    sizes = {"parameters": flops.count_parameters(model), "flops": work}
    sizes["flops_served"] = flops.as_served(model, work, scores["layers"])  # under the limit
    return {"test": scores, "test_no_limit": unlimited} | sizes


def evaluate_run(config: Config, context) -> dict:
    """Tests a trained model with the routing of the eval_ constants, or `--init_from` with any constants."""
    with clear_errors():
        data = TokenData.open(config.data, config, context)
        run = Run(replace(config, resume=True), PRESETS, context, data)
        _, checkpoint = newest(run.folder)
        if not checkpoint and not config.init_from:
            reason = f"; {run.reason}" if run.reason else ""
            hint = f"first train with all constants but eval_ ones, or pass --init_from RUN to test that run{reason}"
            raise ValueError(f"{run.folder.absolute()} has no checkpoint: {hint}")
        model = build(config, data, context)
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
        trained = {} if checkpoint else read_json(Path(config.init_from, "config.json"))
    file = f"eval-t={config.eval_threshold}-capacity={config.eval_capacity}.json"
    previous = read_json(run.folder / file)
    identity = {"name": run.name, "step": checkpoint.get("step", 0), "code": run.code}
    if checkpoint and config.resume and identity.items() <= previous.items():
        return previous  # the same test of the same weights
    result = identity | test(model, data, context) | {"config": run.identity}
    if not checkpoint:  # claims the new folder for this run
        run.write("config.json", run.identity)
        names = [name for name in differing(trained, run.identity) if name != "init_from" and "checksum" not in name]
        result["trained"] = {name: trained[name] for name in names}
    run.write(file, result)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Printing


LOSS = "{bpb:.3f} bits per byte, perplexity {ppl:.2f}"


def describe(scores: dict) -> str:
    """An evaluation in words, with a line per MoE layer."""
    per_word = " ({word_ppl:.1f} per word)" if scores["word_ppl"] else ""  # if the text has spaces
    words = f"{LOSS}{per_word}  {losses_in_words(scores['layers'])}"
    layers = [f"\n  MoE layer {i}: {describe_routing(layer)}" for i, layer in enumerate(scores["layers"], 1)]
    return words.format(**scores) + "".join(layers)


def report(config: Config, result: dict) -> str:
    """A result in words."""
    scores, unlimited = result["test"], result["test_no_limit"]
    title = result["name"] + ", test"
    if 0 < result.get("step", 0) < config.steps:  # of an interrupted training
        title += f" after {result['step']:,} of {config.steps:,} steps"
    for name in ("threshold", "capacity"):
        at_test = getattr(config, f"eval_{name}")
        title += "" if at_test is None else f", {name} {at_test:g}"
    work, served = result.get("flops"), result.get("flops_served")  # older results lack them
    if served and served != work:
        title += f"; {served / 1e6:.1f} of {work / 1e6:.1f} forward MFLOPs per token used"
    other = [f"{name} {getattr(config, name)} (trained with {x})" for name, x in result.get("trained", {}).items()]
    if other:
        title += f"\nconstants that differ from {config.init_from}: {', '.join(other)}"
    lines = ["", title, "under the limit: " * (unlimited != scores) + describe(scores)]
    if unlimited != scores:
        lines.append(f"without a limit: {describe(unlimited)}")
    if result.get("counting"):
        words = "counting baselines, bits per byte: unigrams {unigrams:.3f}, bigrams of the tokens seen in training "
        words += "{bigrams:.3f}, bigrams of the whole training text {all bigrams:.3f}"
        lines.append(words.format(**result["counting"]))
    return "\n".join(lines)


def write_sample(folder: Path, config: Config, context):
    """Prints a continuation of the prompt, sampled from the run in a folder, without a capacity limit."""
    if not (folder / "ckpt.pt").exists():  # as after evaluating `--init_from`
        return
    with clear_errors():
        model, tokenizer = pretrained.load(folder)
        model.config.eval_threshold = config.eval_threshold  # where routers read it
        [prompt] = tokenizer.encode_batch([config.prompt])
    model = context.place(model)
    ids = torch.tensor([[tokenizer.eot, *prompt]], device=context.device)
    seed_all(config.sample_seed)
    with context.autocast(), model.no_limit(), torch.no_grad():
        sampling = config.sample_tokens, config.sample_temperature, config.sample_top_k
        ids = model.generate(ids, *sampling, end=tokenizer.eot)
        watches = [RoutingStats(moe) for moe in model.moe_layers]
        model.hidden(ids[:, -model.config.block_size :])  # one pass over all tokens, for the statistics
    show(f"\nsample:\n{tokenizer.decode(ids[ids != tokenizer.eot].tolist())}")
    served = ", ".join(f"{watch.finish()['served']:.1f}" for watch in watches)
    if served:
        show(f"({served} experts served per token)")


def main():
    config, context = start(Config, PRESETS)
    [first, *_], *_ = carry_out(config, PRESETS, context, TABLES, train, report, cells)
    if context.rank == 0 and not config.table:
        write_sample(Path(config.out_dir, first["name"]), config, context)


if __name__ == "__main__":
    main()
