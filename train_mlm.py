"""X-MoE's encoders: masked language models of many languages, with sparse experts routed on a hypersphere (table 2).

    python train_mlm.py                                        the demo: X-MoE, on English and three ciphers of it
    python train_mlm.py --router switch                        the baseline SMoE; --router dense: no experts
    python train_mlm.py --gate softmax --routing_dim 4         another gate, and a sphere of fewer dimensions
    python train_mlm.py --table 2                              every row of a table, beside the paper's numbers
    python train_mlm.py --preset small                         more text: see `messages` in data/README.md
    torchrun --nproc_per_node 8 train_mlm.py --preset base     the paper's model and schedule, on 8 GPUs

Prints, at every evaluation, the perplexity of masked tokens, how the sparse layers route, and X-MoE's two measures: RC
says how far the vectors of an expert's tokens have collapsed around their mean (the smaller, the more), and RF which
share of the tokens has changed its expert since the last evaluation. In the end it prints the perplexity of every
language. A run is kept in out/train_mlm/NAME; the same command goes on where it stopped. `--help` lists every constant.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch
from torch import Tensor

from analysis import flops, measures
from data import counting
from data.batches import MaskedData
from engine import parallel, pretrained
from engine.device import clear_errors, seed_all
from engine.optim import adamw, clip_gradients, linear, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from model import PAD, MaskedLM, cross_entropy

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, small, or base: the paper's
    table: int | None = None  # run every row of X-MoE's table 2, 3 or 5 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "ciphers"  # a folder of LANGUAGE.txt, a corpus of languages under data/prepared, or a prepared folder
    sampling_exponent: float = 0.7  # a language is drawn in proportion to its tokens to this power
    mask_share: float = 0.4  # of the tokens is to be predicted; the paper's 0.15 teaches less in so short a run
    seed: int = 0  # of weights, data order, masks and dropout
    # the model
    n_layer: int = 4  # layers, without the sparse ones
    n_head: int = 4  # H
    n_embd: int = 48  # D
    ffn_size: int = 192  # inner width of an FFN
    block_size: int = 32  # T, the longest sequence; in longer ones neighbours are found later
    dropout: float = 0.0  # after embeddings, attention weights, attention and FFN; the sparse layers have none
    init_std: float = 0.05  # of the normal that weights start from; from 0.02 so narrow an encoder learns later
    frequency_bias: bool = True  # the output's bias starts at the log frequencies of the training tokens, else at 0
    relative_bias: bool = True  # XLM-E's gated position bias; without it the demo stays behind counting for long
    # its experts
    router: str = "hypersphere"  # dense, or a name in routers.ROUTERS; switch is the paper's baseline SMoE
    score: Literal["dot", "hypersphere"] | None = None  # how well a token fits an expert; None: the router's
    gate: Literal["softmax", "sigmoid"] | None = "sigmoid"  # the weight of a chosen expert; None: the router's
    moe_after: tuple[int, ...] = (4,)  # a sparse layer stands after each of these layers, counted from 1
    experts: int = 16  # E
    expert_size: int = 192  # F, the inner width of an expert's FFNs
    expert_layers: int = 3  # FFNs of an expert, each with a norm and a residual around it; 0: one FFN without them
    top_k: int = 1  # K, experts per token
    capacity_factor: float = float("inf")  # gamma: an expert serves gamma * S / E of S tokens at most; inf: no limit
    threshold: float = 0.9  # t of XMoE's router, the probability that the chosen experts must reach together
    eval_threshold: float | None = None  # t at test; None: the same
    routing_dim: int | None = None  # d_e, what the router projects to; 0: nothing; None: on a hypersphere E / 2
    init_temperature: float | None = None  # tau_0 of a hypersphere; None: the gate's
    router_std: float = 0.02  # of the normal that the router's projection starts from
    balance_coef: float = 0.01  # alpha, the weight of the balance loss (eq. 10)
    # training
    steps: int = 4000  # optimizer steps
    batch_tokens: int = 1024  # tokens of a step, over all processes and micro-batches
    micro_tokens: int = 1024  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 3e-3  # peak
    router_lr: float = 0.2  # routers learn at so many times the rate of the rest
    distance_lr: float = 10.0  # the relative bias likewise: in so few steps it would not grow to look at neighbours
    warmup: float = 0.08  # share of the steps; then a line down to 0
    beta2: float = 0.999  # Adam; in small batches a token is rare: its gradient must be remembered
    eps: float = 1e-9  # Adam; the gradients of experts that few tokens choose are small
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit (X-MoE does not say; this is XLM-E's)
    eval_every: int = 500  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 15  # validation tokens of an evaluation, at most
    eval_maskings: int = 10  # the last evaluation is the mean over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    # where and how
    out_dir: str = "out/train_mlm"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # torch.compile; None: where products are in bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: less memory, for a second forward pass
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    init_from: str | None = None  # folder of another run, or of XLM-R, which has no sparse layers: they start new


# X-MoE appendices A and B; the paper says neither the micro-batch nor a limit of the gradient: they are ours.
BASE = dict(data="cc100", mask_share=0.15, router_lr=1.0)
BASE |= dict(n_layer=12, n_head=12, n_embd=768, init_std=0.02)
BASE |= dict(ffn_size=3072, block_size=512, dropout=0.1)
BASE |= dict(moe_after=(6,), experts=32, expert_size=3072, gate=None)
BASE |= dict(frequency_bias=False, relative_bias=False, distance_lr=1.0)
BASE |= dict(steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512)
BASE |= dict(learning_rate=5e-4, beta2=0.98, eps=1e-6)
BASE |= dict(eval_every=5000, eval_tokens=1 << 25, recompute=True, dtype="auto")
# Real text, in 48 languages, and an encoder that is narrow for it. A quarter of an hour on one core.
SMALL = dict(data="messages", n_embd=64, ffn_size=256, block_size=64, init_std=0.02)
SMALL |= dict(expert_size=256, gate=None)
SMALL |= dict(steps=10_000, learning_rate=2e-3)
SMALL |= dict(eval_every=2000, eval_tokens=1 << 17, eval_maskings=3, dtype="auto")
PRESETS = {
    "demo": {},
    "small": SMALL,
    "base": BASE,
}

# ---------------------------------------------------------------------------------------------------------------------
# Tables. The paper's numbers in tables 3 and 5 are XNLI and MLQA (F1 / EM) after fine-tuning.

TITLES = {
    2: "X-MoE table 2: validation perplexity",
    3: "X-MoE table 3, pre-training: reduction and norm, sigmoid gate",
    5: "X-MoE table 5, pre-training: the routing dimension, sigmoid gate",
}


def rows(number: int, E: int) -> list[tuple]:
    """Of each row of a table with E experts: the model, the paper's numbers, and what it changes."""
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
    found = [((label, scores), change) for label, scores, change in rows(number, base.experts)]
    return Table(TITLES[number], ("model", paper), found)


TABLES = {number: partial(table, number) for number in TITLES}


def cells(result: dict) -> dict:
    """A row of any of the tables; of what is measured of routing the mean over sparse layers."""
    mean = partial(measures.mean_over_layers, layers=result["valid"]["layers"])
    return {
        "params, M": (result["parameters"]["total"] / 1e6, ".1f"),
        "our perplexity": (result["valid"]["ppl"], ".2f"),
        "ahead at step": (result.get("ahead"), ",.0f"),
        "RC": (mean("rc"), ".2f"),
        "RC at first": (measures.mean_over_layers("rc", result.get("first", [])), ".2f"),
        "RF": (mean("rf"), ".1%"),
        "load imbalance": (mean("imbalance"), ".2f"),
        "temperature": (mean("temperature"), ".3f"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# One run


@torch.no_grad()
def evaluate(model: MaskedLM, data: MaskedData, config: Config, context, maskings: int, before: list[Tensor] | None):
    """-> scores on the validation text, and the experts that its tokens chose, (N,) for each sparse layer.

    Scores are the mean cross entropy of the masked tokens, their perplexity, overall and of each language, the balance
    loss, and for each sparse layer routing statistics, RC, RF against the choices `before`, and temperature.
    """
    model.eval()
    tokens = data.eval_tokens("valid", config.eval_tokens)
    routing = [measures.RoutingStats(moe) for moe in model.moe_layers]
    collapse = [measures.Collapse(moe, tokens) for moe in model.moe_layers]
    losses, counts = torch.zeros(2, len(data.languages), dtype=torch.float64)  # of the masked tokens of each language
    balances = torch.zeros((), dtype=torch.float64)
    for k, first, batch in data.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world):
        seed_all(config.seed, 0, 1 + k, first)  # for a router that draws
        for watch in collapse:  # RC and RF are of the first masking
            watch.place = first if k == 0 else None  # where this batch's tokens begin among all
        ids, masked, targets, real = context.send_all(*batch[:4])
        with context.autocast():
            logits, balance = model(ids, masked, real=real)
        loss = cross_entropy(logits, targets, per_token=True).cpu().double()  # (M,)
        losses.index_add_(0, batch.language, loss)
        counts.index_add_(0, batch.language, torch.ones_like(loss))
        balances += float(balance) * len(loss)
    losses, counts, balances = map(context.sum, (losses, counts, balances))
    model.train()
    predicted = int(counts.sum())
    loss = float(losses.sum() / predicted)
    scores = {"loss": loss, "ppl": measures.perplexity(loss), "languages": {}, "layers": []}
    scores |= {"balance": float(balances) / predicted, "tokens": tokens, "predicted": predicted}
    for name, total, count in zip(data.languages, losses.tolist(), counts.tolist()):
        if count:
            scores["languages"][name] = measures.perplexity(total / count)
    for i, moe in enumerate(model.moe_layers):
        layer = routing[i].finish(context.sum)
        layer |= collapse[i].finish(before[i] if before else None, context.sum)
        layer["temperature"] = moe.router.temperature.item() if moe.router.on_sphere else None  # X-MoE eq. 8
        scores["layers"].append(layer)
    return scores, [watch.chosen for watch in collapse]


def build(config: Config, data: MaskedData, context) -> MaskedLM:
    """The model drawn from the seed, or that of `--init_from`."""
    seed_all(config.seed)
    model = context.place(MaskedLM(config, data.vocab_size))
    if config.frequency_bias:
        model.bias.data.copy_(data.log_frequencies())
    if config.init_from:
        constants, weights = pretrained.weights_of(config.init_from, "MaskedLM", data.tokenizer.sha256)
        constants.pop("block_size")  # fewer positions may be taken
        weights["encoder.wpe.weight"] = weights["encoder.wpe.weight"][: PAD + 1 + config.block_size]
        # What the checkpoint lacks stays new: sparse layers, or the head.
        new = {name: x for name, x in model.state_dict().items() if "moes." in name or "encoder." not in name}
        pretrained.fill(model, constants, new | weights, config.init_from)
    return model


def train(config: Config, context) -> dict:
    """Trains (or goes on training) an encoder -> its result, which is also in result.json."""
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
        size = "{total:,} parameters, {active:,.0f} active a token".format(**parameters)
        context.say(f"{run.name}: {size}; {work / 1e6:.1f} MFLOPs a token forward")
        counted = counting.masked_scores(data, config.eval_tokens)
        context.say(counting.in_words(counted))
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        run.resume(model, optimizer, work, measures.in_perplexity)

    chosen = run.kept.get("chosen")  # experts at the last evaluation
    for step in run.steps():
        set_learning_rate(optimizer, linear(step, config.steps, config.warmup, config.learning_rate))
        batches = [data.batch("train", step, micro) for micro in run.micros]
        predicted = context.mean(sum(len(batch.targets) for batch in batches)) or 1.0
        for micro, batch in zip(run.micros, batches):
            seed_all(config.seed, 1 + step, micro)  # all that is random: so a resumed run is the same run
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP exchanges gradients once
            with context.autocast():
                loss, balance = forward(*context.send_all(*batch[:4]))
            total = loss + config.balance_coef * balance  # X-MoE eq. 10
            share = len(batch.targets) / predicted  # a step's loss is the mean over all its masked tokens
            (share * total).backward()
            run.add(share * loss, tokens=batch.tokens)
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()  # brings expert embeddings back to their sphere
        if run.due(step + 1):
            maskings = config.eval_maskings if step + 1 == config.steps else 1
            scores, chosen = evaluate(model, data, config, context, maskings, before=chosen)
            run.kept |= {"valid": scores, "chosen": chosen}
            run.kept.setdefault("first", scores["layers"])  # of which RC then rises or falls
            if scores["ppl"] < counted.get("neighbours", {}).get("ppl", 0):
                run.kept.setdefault("ahead", step + 1)
            run.save(step + 1, scores, f"valid {describe(scores)}", scores["loss"])

    measured = {name: run.kept.get(name) for name in ("valid", "first", "ahead")}
    return run.finish(measured | {"counting": counted, "parameters": parameters, "flops": work})


def describe(scores: dict) -> str:
    """What one evaluation found, a line a sparse layer."""
    lines = ["perplexity {ppl:.2f} ({predicted:,} masked tokens)  balance {balance:.3f}".format(**scores)]
    for i, layer in enumerate(scores["layers"], 1):
        changed = "-" if layer["rf"] is None else f"{layer['rf']:.1%}"
        lines.append(f"  sparse layer {i}: RC {layer['rc']:.2f}, RF {changed}; {measures.describe_routing(layer)}")
        if layer["temperature"]:
            lines[-1] += f", temperature {layer['temperature']:.4f}"
    return "\n".join(lines)


def report(config: Config, result: dict) -> str:
    """A finished result in words, the languages from the easiest to the hardest."""
    languages = result["valid"]["languages"]
    words = ", ".join(f"{name} {languages[name]:.2f}" for name in sorted(languages, key=languages.get))
    lines = [f"\n{result['name']}, perplexity of every language:", words, f"valid {describe(result['valid'])}"]
    lines.append(counting.in_words(result["counting"]))
    counted = result["counting"].get("neighbours", {}).get("languages")
    if counted:
        ahead = sum(ppl < counted[name] for name, ppl in languages.items() if name in counted)
        since = f", and in all together since step {result['ahead']}" if result["ahead"] else ""
        lines.append(f"the model is ahead of counting by neighbours in {ahead} of {len(counted)} languages{since}")
    for first, last in zip(result["first"], result["valid"]["layers"]):
        lines.append(f"RC {first['rc']:.0f} at the first evaluation, {last['rc']:.0f} at the last; RF {last['rf']:.1%}")
    return "\n".join(lines)


def main():
    config, context = start(Config, PRESETS)
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
