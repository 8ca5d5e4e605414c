"""X-MoE's encoders: multilingual masked language models with sparse experts, routed on a hypersphere (table 2).

    python train_mlm.py                                        the demo: X-MoE, on English and three ciphers of it
    python train_mlm.py --router switch                        the baseline SMoE; --router dense: no experts
    python train_mlm.py --gate softmax --routing_dim 4         another gate, and a sphere of fewer dimensions
    python train_mlm.py --table 2                              every row of a table, next to the paper's numbers
    torchrun --nproc_per_node 8 train_mlm.py --preset base     the paper's model and schedule, on 8 GPUs

Each evaluation prints the perplexity of masked tokens, how the sparse layers route, and X-MoE's two measures: RC, how
far the hidden states of an expert's tokens have collapsed around their mean (lower: more collapse), and RF, the share
of tokens whose expert changed since the previous evaluation. A run ends with the perplexity of each language. It
lives in out/train_mlm/NAME; the same command resumes it. `--help` lists all constants.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch
from torch import Tensor

from data.batches import MaskedData
from data.files import progress
from engine import parallel, pretrained
from engine.device import clear_errors, seed_all
from engine.optim import adamw, clip_gradients, linear, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from metrics import counting, flops, in_perplexity, perplexity
from metrics.routing import Collapse, RoutingStats, describe_routing, losses_in_words, mean_over_layers
from model import PAD, MaskedLM, cross_entropy

# ---------------------------------------------------------------------------------------------------------------------
# Constants: edit one here, or pass --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, or base (the paper's)
    table: int | None = None  # run every row of X-MoE's table 2, 3 or 5 at the preset's scale
    seeds: int = 1  # train this many seeds and report mean and standard deviation
    data: str = "ciphers"  # a folder of LANGUAGE.txt files, a corpus under data/prepared, or a prepared folder
    sampling_exponent: float = 0.7  # a language is sampled in proportion to its number of tokens to this power
    mask_share: float = 0.4  # share of tokens to predict; with the paper's 0.15 the demo learns less
    seed: int = 0  # seed of weights, data order, masks and dropout
    # the model
    n_layer: int = 4  # number of layers, not counting sparse ones
    n_head: int = 4  # number of attention heads (H)
    n_embd: int = 48  # width of the model (D)
    ffn_size: int = 192  # inner width of an FFN
    block_size: int = 32  # longest sequence in tokens (T); with longer ones the model learns to use neighbours later
    dropout: float = 0.0  # dropout of embeddings, attention weights, attention and FFN; none in sparse layers
    init_std: float = 0.05  # standard deviation of initial weights; at 0.02 a narrow encoder learns later
    frequency_bias: bool = True  # initialize the output bias to the log frequencies of the training tokens, else to 0
    relative_bias: bool = True  # XLM-E's gated relative position bias; without it the demo takes long to beat counting
    # experts
    router: str = "hypersphere"  # dense, a name in routers.ROUTERS (switch is the paper's SMoE), or FILE.py:NAME
    score: Literal["dot", "hypersphere"] | None = None  # token-expert similarity; None: the router's default
    gate: Literal["softmax", "sigmoid"] | None = "sigmoid"  # weight of a chosen expert; None: the router's default
    moe_after: tuple[int, ...] = (4,)  # insert a sparse layer after each of these layers, counted from 1
    experts: int = 16  # number of experts per sparse layer (E)
    expert_size: int = 192  # inner width of an expert's FFNs (F)
    expert_layers: int = 3  # pre-norm residual FFNs per expert; 0: one plain FFN
    top_k: int = 1  # experts that a token may choose (K)
    capacity_factor: float = float("inf")  # gamma: an expert serves at most gamma * S / E of S tokens; inf: no limit
    threshold: float = 0.9  # for XMoE's router: the chosen experts' probabilities must sum to this t
    eval_threshold: float | None = None  # threshold at test; None: the same
    routing_dim: int | None = None  # dimension that routers project to (d_e); 0: none; None: E / 2 on a hypersphere
    init_temperature: float | None = None  # initial temperature tau_0 on a hypersphere; None: the paper's for the gate
    router_std: float = 0.02  # standard deviation of the router's initial projection
    balance_coef: float = 0.01  # weight of the balance loss (alpha, eq. 10)
    # training
    steps: int = 4000  # optimizer steps
    batch_tokens: int = 1024  # tokens per step, over all processes and micro-batches
    micro_tokens: int = 1024  # tokens per forward pass; changes results under a capacity limit
    learning_rate: float = 3e-3  # learning rate at the end of the warm-up, its peak
    router_lr: float = 0.2  # learning rate multiplier of the routers
    rel_bias_lr: float = 10.0  # learning rate multiplier of the relative position bias; at 1 it hardly grows in time
    warmup: float = 0.08  # share of steps for linear warm-up; then linear decay to 0
    beta2: float = 0.999  # Adam's beta2 (decay of squared gradients); high, since tokens are rare in small batches
    eps: float = 1e-9  # Adam's epsilon; low, since rarely chosen experts have small gradients
    weight_decay: float = 0.01  # weight decay of matrices and embeddings
    grad_clip: float = 2.0  # clip the gradient to this norm; 0: no clipping (X-MoE does not say; this is XLM-E's)
    eval_every: int = 500  # evaluate and save a checkpoint every N steps
    eval_tokens: int = 1 << 15  # validation tokens per evaluation, at most
    eval_maskings: int = 10  # fixed maskings that the last evaluation averages over; the others use one
    log_every: int = 10  # report the training loss every N steps
    # where and how
    out_dir: str = "out/train_mlm"  # folder of all runs
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; None: for bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: saves memory at the cost of a second forward pass
    resume: bool = True  # resume from the newest checkpoint; false: start over
    init_from: str | None = None  # start from another run's folder, or from XLM-R, whose missing sparse layers are new


# X-MoE appendices A and B; micro-batch and gradient clipping are ours, since the paper gives none.
BASE = dict(data="cc100", mask_share=0.15, router_lr=1.0)
BASE |= dict(n_layer=12, n_head=12, n_embd=768, init_std=0.02)
BASE |= dict(ffn_size=3072, block_size=512, dropout=0.1)
BASE |= dict(moe_after=(6,), experts=32, expert_size=3072, gate=None)
BASE |= dict(frequency_bias=False, relative_bias=False, rel_bias_lr=1.0)
BASE |= dict(steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512)
BASE |= dict(learning_rate=5e-4, beta2=0.98, eps=1e-6)
BASE |= dict(eval_every=5000, eval_tokens=1 << 25, dtype="auto")
PRESETS = {"demo": {}, "base": BASE}

# ---------------------------------------------------------------------------------------------------------------------
# Tables. In tables 3 and 5 the paper's numbers are XNLI and MLQA (F1 / EM) after fine-tuning.

TITLES = {
    2: "X-MoE table 2: validation perplexity",
    3: "X-MoE table 3, pre-training: reduction and norm, sigmoid gate",
    5: "X-MoE table 5, pre-training: the routing dimension, sigmoid gate",
}


def rows(number: int, E: int) -> list[tuple]:
    """The rows of a table with E experts: the model, the paper's numbers, the row's constants."""
    smoe, x_moe = (dict(router=router, gate="sigmoid") for router in ("switch", "hypersphere"))
    softmax = dict(gate="softmax")
    if number == 2:
        return [
            ("dense", "23.51", dict(router="dense")),
            ("one expert for all, sigmoid", "", smoe | dict(experts=1)),
            ("hash", "", dict(router="hash")),
            ("SMoE, softmax", "19.02", smoe | softmax),
            ("X-MoE, softmax", "18.72", x_moe | softmax),
            ("SMoE, sigmoid", "19.59", smoe),
            ("X-MoE, sigmoid", "19.12", x_moe),
        ]
    if number == 3:
        return [
            ("reduction, L2 norm", "72.2, 64.3 / 46.0", x_moe),
            ("L2 norm", "71.5, 63.4 / 45.2", x_moe | dict(routing_dim=0)),
            ("reduction", "71.4, 63.0 / 45.2", smoe | dict(routing_dim=E // 2)),
            ("neither", "71.6, 63.6 / 45.5", smoe),
        ]
    return [
        ("E / 4", "71.4, 64.3 / 46.4", x_moe | dict(routing_dim=E // 4)),
        ("E / 2", "72.2, 64.3 / 46.0", x_moe),
        ("E", "71.7, 63.8 / 45.9", x_moe | dict(routing_dim=E)),
        ("2 E", "71.7, 62.7 / 44.8", x_moe | dict(routing_dim=2 * E)),
        ("4 E", "71.2, 63.1 / 45.0", x_moe | dict(routing_dim=4 * E)),
    ]


def table(number: int, base: Config) -> Table:
    paper = "paper, perplexity" if number == 2 else "paper, fine-tuned: XNLI, MLQA"
    labelled = [((label, scores), change) for label, scores, change in rows(number, base.experts)]
    return Table(TITLES[number], ("model", paper), labelled)


TABLES = {number: partial(table, number) for number in TITLES}


def cells(result: dict) -> dict:
    """A row of any table; routing statistics are means over sparse layers."""
    mean = partial(mean_over_layers, layers=result["valid"]["layers"])
    return {
        "params, M": (result["parameters"]["total"] / 1e6, ".1f"),
        "perplexity": (result["valid"]["ppl"], ".2f"),
        "beats counting since step": (result.get("since_step"), ",.0f"),
        "RC": (mean("rc"), ".2f"),
        "RC at first": (mean_over_layers("rc", result.get("first", [])), ".2f"),
        "RF": (mean("rf"), ".1%"),
        "load imbalance": (mean("imbalance"), ".2f"),
        "temperature": (mean("temperature"), ".3f"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# One run


@torch.no_grad()
def evaluate(model: MaskedLM, data: MaskedData, config: Config, context, maskings: int, before: list[Tensor] | None):
    """-> validation scores, and the expert of each token, (N,) for each sparse layer.

    Scores are the mean cross entropy and perplexity of masked tokens, the perplexity of each language, and
    for each sparse layer routing statistics, RC, RF relative to the experts `before`, and temperature.
    """
    model.eval()
    tokens = data.eval_tokens("valid", config.eval_tokens)
    routing = [RoutingStats(moe) for moe in model.moe_layers]
    collapse = [Collapse(moe, tokens) for moe in model.moe_layers]
    losses, counts = torch.zeros(2, len(data.languages), dtype=torch.float64)  # per language, over its masked tokens
    batches = data.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world)
    for k, first, batch in progress(batches, "evaluating"):
        seed_all(config.seed, 0, 1 + k, first)  # for routers that sample
        for watch in collapse:  # RC and RF are measured on the first masking
            watch.place = first if k == 0 else None  # index of the batch's first token
        ids, masked, targets, nonpad = context.send_all(*batch[:4])
        with context.autocast():
            logits, _ = model(ids, masked, nonpad=nonpad)
        loss = cross_entropy(logits, targets, per_token=True).cpu().double()  # (M,)
        losses.index_add_(0, batch.language, loss)
        counts.index_add_(0, batch.language, torch.ones_like(loss))
    losses, counts = map(context.sum, (losses, counts))
    model.train()
    predicted = int(counts.sum())
    loss = float(losses.sum() / predicted)
    scores = {"loss": loss, "ppl": perplexity(loss), "languages": {}, "layers": []}
    scores |= {"tokens": tokens, "predicted": predicted}
    for name, total, count in zip(data.languages, losses.tolist(), counts.tolist()):
        if count:
            scores["languages"][name] = perplexity(total / count)
    for i, moe in enumerate(model.moe_layers):
        layer = routing[i].finish(context.gather)
        layer |= collapse[i].finish(before[i] if before else None, context.sum)
        layer["temperature"] = moe.router.temperature.item() if moe.router.on_sphere else None  # X-MoE eq. 8
        scores["layers"].append(layer)
    return scores, [watch.chosen for watch in collapse]


def build(config: Config, data: MaskedData, context) -> MaskedLM:
    """A new model, initialized with the weights of `--init_from` if given."""
    seed_all(config.seed)
    model = context.place(MaskedLM(config, data.vocab_size))
    if config.frequency_bias:
        model.bias.data.copy_(data.log_frequencies())
    if config.init_from:
        constants, weights = pretrained.weights_of(config.init_from, "MaskedLM", data.tokenizer.sha256)
        constants.pop("block_size")  # may be shorter here
        weights["encoder.wpe.weight"] = weights["encoder.wpe.weight"][: PAD + 1 + config.block_size]
        # Sparse layers or the head stay new if the checkpoint lacks them.
        new = {name: x for name, x in model.state_dict().items() if "moes." in name or "encoder." not in name}
        pretrained.fill(model, constants, new | weights, config.init_from)
    return model


def train(config: Config, context) -> dict:
    """Trains an encoder, or resumes training -> the content of result.json."""
    with clear_errors():
        shares = {"exponent": config.sampling_exponent, "mask_share": config.mask_share}
        data = MaskedData.open(config.data, config, context, **shares)
        run = Run(config, PRESETS, context, data)
        if run.result:
            return run.result
        model = build(config, data, context)
        parameters = flops.count_parameters(model)
        head = config.mask_share * flops.masked_head_flops(model)  # only masked tokens pass through it
        work = flops.flops_per_token(model.encoder, config, head)
        size = "{total:,} parameters, {active:,.0f} active per token".format(**parameters)
        context.say(f"{run.name}: {size}; {work / 1e6:.1f} forward MFLOPs per token")
        counted = counting.masked_scores(data, config.eval_tokens)
        context.say(counting.in_words(counted))
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        run.resume(model, optimizer, work, in_perplexity)

    chosen = run.extra.get("chosen")  # experts at the last evaluation
    for step, batches in run.steps_with(lambda step: [data.batch("train", step, micro) for micro in run.micros]):
        set_learning_rate(optimizer, linear(step, config.steps, config.warmup, config.learning_rate))
        predicted = context.mean(sum(len(batch.targets) for batch in batches)) or 1.0
        for micro, batch in zip(run.micros, batches):
            seed_all(config.seed, 1 + step, micro)  # so a resumed run equals an uninterrupted one
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP averages gradients once per step
            with context.autocast():
                loss, router_loss = forward(*context.send_all(*batch[:4]))
            share = len(batch.targets) / predicted  # a step's loss is the mean over all its masked tokens
            (share * (loss + router_loss)).backward()  # X-MoE eq. 10
            run.add(share * loss, tokens=batch.tokens)
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step(context.sum)  # projects expert embeddings back onto their sphere
        if run.due(step + 1):
            maskings = config.eval_maskings if step + 1 == config.steps else 1
            scores, chosen = evaluate(model, data, config, context, maskings, before=chosen)
            run.extra |= {"valid": scores, "chosen": chosen}
            run.extra.setdefault("first", scores["layers"])  # to show how RC changes
            if scores["ppl"] < counted.get("neighbours", {}).get("ppl", 0):
                run.extra.setdefault("since_step", step + 1)
            run.save(step + 1, scores, f"valid {describe(scores)}", scores["loss"])

    measured = {name: run.extra.get(name) for name in ("valid", "first", "since_step")}
    measured["flops_served"] = flops.as_served(model, work, measured["valid"]["layers"])
    return run.finish(measured | {"counting": counted, "parameters": parameters, "flops": work})


def describe(scores: dict) -> str:
    """An evaluation in words, with a line per sparse layer."""
    words = "perplexity {ppl:.2f} ({predicted:,} masked tokens)  ".format(**scores)
    lines = [words + losses_in_words(scores["layers"])]
    for i, layer in enumerate(scores["layers"], 1):
        changed = "-" if layer["rf"] is None else f"{layer['rf']:.1%}"
        lines.append(f"  sparse layer {i}: RC {layer['rc']:.2f}, RF {changed}; {describe_routing(layer)}")
        if layer["temperature"]:
            lines[-1] += f", temperature {layer['temperature']:.4f}"
    return "\n".join(lines)


def report(config: Config, result: dict) -> str:
    """A result in words, with languages sorted from easiest to hardest."""
    languages = result["valid"]["languages"]
    words = ", ".join(f"{name} {languages[name]:.2f}" for name in sorted(languages, key=languages.get))
    lines = [f"\n{result['name']}, perplexity per language:", words, f"valid {describe(result['valid'])}"]
    lines.append(counting.in_words(result["counting"]))
    if result["since_step"]:
        lines.append(f"the model beats counting by neighbours since step {result['since_step']}")
    for first, last in zip(result["first"], result["valid"]["layers"]):
        lines.append(f"RC was {first['rc']:.0f} at the first evaluation and is {last['rc']:.0f} at the last")
    return "\n".join(lines)


def main():
    config, context = start(Config, PRESETS)
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
