"""XLM-E: cross-lingual pre-training as replaced token detection, with ELECTRA's generator and discriminator.

    python train_electra.py                                        the demo, on sentences and pairs on this disk
    python train_electra.py --objective mlm                        the baseline: XLM, a masked LM on the same batches
    python train_electra.py --tlm false                            sentences alone; --relative_bias false: no gate
    python train_electra.py --router hypersphere                   sparse layers in the discriminator, any router
    torchrun --nproc_per_node 8 train_electra.py --preset base     the paper's model and schedule, on 8 GPUs
    python train_electra.py --table 2                              every row of the ablation

A step has a batch of sentences (MLM, MRTD) and one of translation pairs (TLM, TRTD). The generator fills in the masked
tokens; the discriminator says of every token whether it was replaced. Prints, at every evaluation, how both do on both
kinds of text, beside a blind guess; whether a translation helps the generator; and how many held-out sentences
have their translation as the nearest. A run is kept in out/train_electra/NAME; the same command goes on where it
stopped. The checkpoint's `encoder.` is the discriminator. `--help` lists every constant.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import measures
import parallel
import runs
from data import counting
from data.batches import Masked, MaskedData, PairData
from model import Encoder, MaskedLM, ModelConfig, SparseModel

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config(ModelConfig):
    preset: str = "demo"  # demo, multilingual, small, or the paper's base, large and xl
    table: int | None = None  # run every row of XLM-E's table 2 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    pairs: str = "catalogs-pairs"  # translation pairs under data/prepared, or the folder of prepared ones
    sampling_exponent: float = 0.7  # alpha of eq. 9: a language is drawn in proportion to its size to this power
    objective: Literal["rtd", "mlm"] = "rtd"  # rtd: XLM-E; mlm: its baseline XLM, a masked LM of n_layer layers
    tlm: bool = True  # masked LM on translation pairs as well
    trtd: bool = True  # replaced token detection on translation pairs as well, where TLM has them
    lambda_disc: float = 5.0  # lambda, the weight of the discriminator's losses; 50 holds a young generator back
    mask_share: float = 0.4  # of the tokens are masked; of a pair, in each half; 0.15 teaches less in a demo
    span: float | None = None  # mean length of masked spans; None: single tokens (section 3.1: spans do worse)
    generator_layers: int = 2  # of the generator, which is as wide as the discriminator
    block_size: int = 128  # T, the longest row
    frequency_bias: bool = True  # the generator's output bias starts at the log frequencies of the training tokens
    init_std: float = 0.02  # of the normal that weights start from
    relative_bias: bool | None = None  # gated relative position bias (section 3.3), in both networks; None: with rtd
    # of the discriminator, or of the baseline: hypersphere is X-MoE's
    router: Literal["dense", "switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice"] = "dense"
    moe_after: tuple[int, ...] = (2,)  # sparse layers stand behind these layers, from 1
    seed: int = 0  # of weights, data order, masks, replaced tokens and dropout
    steps: int = 8000  # optimizer steps
    batch_tokens: int = 512  # tokens of a step, over all processes, for sentences and again for pairs
    micro_tokens: int = 512  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1.5e-3  # peak
    router_lr: float = 1.0  # routers learn at so many times the rate of the rest
    distance_lr: float = 10.0  # the relative bias likewise: in so few steps it would not grow to look at neighbours
    warmup: float = 0.1  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam; in small batches a token is rare: its gradient must be remembered
    eps: float = 1e-9  # Adam; the gradients of rare tokens are small
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit
    balance_coef: float = 0.01  # the weight of the balance loss, where there are sparse layers
    eval_every: int = 1000  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 14  # validation tokens of sentences, and of pairs, at most (retrieval has its own limit)
    eval_maskings: int = 10  # the final scores are means over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_electra"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    expert_parallel: int = 1  # processes that share out the experts of one model, see parallel.py
    shard: bool = False  # weights and their state lie in pieces over all processes (FSDP2)
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again

    # Constants of other models: as a ClassVar a constant is no option of this script.
    moe_every: ClassVar = 2
    expert_ffns: ClassVar = 8
    decoder_layers: ClassVar = 0
    decoder_moe: ClassVar = True

    not_identity: ClassVar = set()

    def unread(self) -> set[str]:
        names = super().unread()
        if gated(self):
            names.discard("distance_lr")
        if self.objective == "mlm":
            names |= {"lambda_disc", "trtd", "generator_layers"}
        if not self.tlm:
            names |= {"trtd"}
        return names


# XLM-E appendices A and B; micro-batches are ours. Of Large and XL the text says that they have a vocabulary of 500K,
# but only one of 2^19 gives the parameters of table 3.
BASE = dict(block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, generator_layers=4, dropout=0.1)
BASE |= dict(data="cc100", pairs="opus100", steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512)
BASE |= dict(learning_rate=5e-4, warmup=0.08, eval_every=5000, eval_tokens=1 << 25, moe_after=(6,))
BASE |= dict(mask_share=0.15, frequency_bias=False, lambda_disc=50.0, beta2=0.98, eps=1e-6, distance_lr=1.0)
LARGE = BASE | dict(n_layer=24, n_head=16, n_embd=1024, ffn_size=4096, generator_layers=6, moe_after=(12,))
LARGE |= dict(vocab_size=1 << 19)
XL = LARGE | dict(n_layer=48, n_head=24, n_embd=1536, ffn_size=6144, generator_layers=8, moe_after=(24,))
# Twice the width, at which the demo's learning rate hardly learned (before its lambda, beta2 and eps).
SMALL = dict(n_embd=256, ffn_size=1024, learning_rate=7.5e-4)
# The demo on real text and pairs in four languages (`python -m data.multilingual` makes them).
MULTILINGUAL = dict(data="multilingual", pairs="multilingual-pairs")
PRESETS = {"demo": {}, "multilingual": MULTILINGUAL, "small": SMALL, "base": BASE, "large": LARGE, "xl": XL}
# How many steps of XLM cost what one of XLM-E does, with the preset's own sizes and vocabulary.
EQUAL_FLOPS = {"demo": 1.354, "multilingual": 1.270, "small": 1.414, "base": 1.260, "large": 1.203, "xl": 1.155}


def table2(base: Config) -> runs.Table:
    """Without TRTD, without the gated bias, and XLM. The paper's numbers are XNLI, MLQA (F1 / EM) after fine-tuning.

    XLM, and XLM-E without pairs, also have the preset's FLOPs of XLM-E. Where sizes are changed as well, the column of
    FLOPs tells how far off.
    """
    more = EQUAL_FLOPS[base.preset]
    longer = dict(objective="mlm", steps=round(more * base.steps))
    rows = [
        (("XLM", "?, 66.2 / 47.8"), dict(objective="mlm")),
        ((f"XLM, {more} x the steps", ""), longer),
        ((f"XLM with the bias, {more} x the steps", ""), longer | dict(relative_bias=True)),
        (("XLM - TLM", "?, 64.0 / 46.0"), dict(objective="mlm", tlm=False)),
        (("XLM-E", "76.6, 68.3 / 49.8"), dict(trtd=True)),
        (("XLM-E - TRTD", "75.1, 67.8 / 49.7"), dict(tlm=False)),
        (("XLM-E - TRTD, 2 x the steps", ""), dict(tlm=False, steps=2 * base.steps)),
        (("XLM-E - TRTD - gate", "?, 67.4 / 49.2"), dict(tlm=False, relative_bias=False)),
    ]
    return runs.Table("XLM-E table 2, pre-training: held-out text", ("model", "paper: XNLI, MLQA"), rows)


def cells(result: dict) -> dict:
    """A row of the table."""
    scores = result["held_out"]
    sentences, pairs, beside = scores["sentences"], scores["pairs"], scores["translation"]
    return {
        "params, M": (result["parameters"]["kept"] / 1e6, ".1f"),
        "FLOPs": (result["flops"], ".2e"),
        "masked tokens right": (sentences["generator"], ".1%"),
        "in pairs": (pairs["generator"], ".1%"),
        "loss saved": (sentences.get("saved"), ".1%"),
        "saved in pairs": (pairs.get("saved"), ".1%"),
        "translation adds": (beside["with"] - beside["without"], "+.2%"),
        "translations found": (scores["retrieval"][middle(scores)], ".1%"),
    }


TABLES = {2: table2}

# ---------------------------------------------------------------------------------------------------------------------
# The two networks


class Electra(SparseModel):
    """A discriminator and a generator (sections 2 and 3), which share token and position embeddings, as in ELECTRA."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.n_embd
        self.config, self.encoder = config, Encoder(config)
        self.dense = nn.Linear(D, D)
        self.ln_h = nn.LayerNorm(D)
        self.out = nn.Linear(D, 1)
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=config.init_std)
            nn.init.zeros_(linear.bias)
        self.generator = MaskedLM(dataclasses.replace(config, n_layer=config.generator_layers, router="dense"))
        self.generator.encoder.wte = self.encoder.wte
        self.generator.encoder.wpe = self.encoder.wpe

    def forward(self, ids: Tensor, masked: Tensor, real: Tensor | None = None, targets: Tensor | None = None):
        """The generator's logits (M, V) and the balance loss; with `targets` the discriminator's answers as well.

        ids (B, T) after masking; masked (M,) places in B * T; real (S,) as in `Encoder`; targets (M,) what stood there.
        The answers are logits (S,), above 0 where a token seems replaced, and whether it was, (S,) bool.
        """
        logits, balance = self.generator(ids, masked, real)
        if targets is None:
            return logits, balance
        drawn = sample(logits)  # (M,)
        corrupt = ids.flatten().index_copy(0, masked, drawn)  # (B * T,), eqs. 2 and 4
        h, balance = self.encoder(corrupt.view_as(ids), real)  # (B, T, D)
        answers = self.out(self.ln_h(F.gelu(self.dense(h)))).flatten()  # (B * T,)
        # A token that was drawn as it stood there counts as original.
        replaced = torch.zeros_like(corrupt, dtype=torch.bool).index_copy(0, masked, drawn != targets)  # (B * T,)
        if real is not None:
            answers, replaced = answers[real], replaced[real]  # (S,)
        return logits, balance, answers, replaced


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """(M,) tokens from softmax(logits), (M, V), without gradient: each is the largest of V logits with Gumbel noise.

    torch.multinomial is slower, and meets a NaN with an assertion on the device.
    """
    logits = logits.float()
    return (logits - torch.rand_like(logits).log_().neg_().log_()).argmax(dim=1)


def make(config: Config) -> Electra | MaskedLM:
    """XLM-E's networks, or its baseline."""
    network = Electra if config.objective == "rtd" else MaskedLM
    return network(dataclasses.replace(config, relative_bias=gated(config)))


def gated(config: Config) -> bool:
    """Whether the networks have the gated relative bias."""
    return config.objective == "rtd" if config.relative_bias is None else config.relative_bias


# ---------------------------------------------------------------------------------------------------------------------
# Losses and scores


class Answers(NamedTuple):
    """What the networks say of a batch of S tokens, M of them masked."""

    logits: Tensor  # (M, V) of what the masked tokens are
    targets: Tensor  # (M,) what they are
    balance: Tensor  # the balance loss
    verdicts: Tensor | None  # (S,) logits, above 0 where a token seems replaced; None where nobody judged
    replaced: Tensor | None  # (S,) bool, whether it was


def ask(forward, batch: Masked, detect: bool, context) -> Answers:
    """The generator (or the baseline) fills in the batch; with `detect` the discriminator judges the outcome."""
    ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
    verdicts = replaced = None
    with context.autocast():
        if detect:
            logits, balance, verdicts, replaced = forward(ids, masked, real, targets)
        else:
            logits, balance = forward(ids, masked, real)
    return Answers(logits, targets, balance, verdicts, replaced)


def losses(answers: Answers) -> tuple[Tensor, Tensor | float, Tensor]:
    """MLM or TLM, the mean over masked tokens; MRTD or TRTD, the mean over all (0: nobody judged); the balance loss."""
    mlm = common.cross_entropy(answers.logits, answers.targets, reduction="sum") / max(1, len(answers.targets))  # eq. 1
    if answers.verdicts is None:
        return mlm, 0.0, answers.balance
    verdicts, truth = answers.verdicts.to(mlm.dtype), answers.replaced.to(mlm.dtype)
    rtd = F.binary_cross_entropy_with_logits(verdicts, truth)  # eqs. 3, 5
    return mlm, rtd, answers.balance


def count(answers: Answers) -> dict[str, float]:
    """What `score` adds up over batches."""
    mlm, rtd, balance = losses(answers)
    M = len(answers.targets)
    counts = {
        "masked": M,
        "mlm": M * float(mlm),
        "generator": int((answers.logits.argmax(dim=1) == answers.targets).sum()),
        "balance": M * float(balance),
    }
    if answers.verdicts is not None:
        replaced = answers.replaced  # (S,)
        counts |= {
            "rtd": len(replaced) * float(rtd),
            "accuracy": int(((answers.verdicts > 0) == replaced).sum()),
            "replaced": int(replaced.sum()),
        }
    return counts


@torch.no_grad()
def score(
    model: Electra | MaskedLM, batches: Iterable, special: Iterable[int], detect: bool, config: Config, context
) -> dict[str, float]:
    """Mean losses and shares of right answers, over all batches of all processes; each batch's draws are fixed.

    saved: by how much the discriminator's loss is below that of a blind guess, which knows that `special` ids are never
    masked, and says of every other token how many of them are replaced; 0 where nothing more has been learned.
    """
    own, sums, special = Counter(), Counter(), torch.tensor([*special])
    for masking, first, batch in batches:
        common.seed_all(config.seed, masking, first, 3)  # training has keys of three numbers
        own.update(count(ask(model, batch, detect, context)))
        shown = batch.ids.flatten() if batch.real is None else batch.ids.flatten()[batch.real]  # (S,)
        ordinary = len(shown) - int(torch.isin(shown, special).sum())  # a mask is special, what it hides is not
        own.update(tokens=len(shown), maskable=len(batch.masked) + ordinary)
    for part in context.gather(own):
        sums.update(part)
    scores = {"masked": sums["masked"], "tokens": sums["tokens"]}
    for name in ("mlm", "generator", "balance"):
        scores[name] = sums[name] / max(1, sums["masked"])
    if detect:
        for name in ("rtd", "accuracy", "replaced"):
            scores[name] = sums[name] / sums["tokens"]
        share = sums["replaced"] / max(1, sums["maskable"])
        blind = -sums["maskable"] / sums["tokens"] * sum(p * math.log(p) for p in (share, 1 - share) if p)
        scores["saved"] = 1 - scores["rtd"] / blind if blind else 0.0
    return scores


@torch.no_grad()
def right_by_row(model: Electra | MaskedLM, batches: Iterable, context) -> Tensor:
    """(2, R): of each row the masked tokens that the generator has right, and how many there are, over all maskings."""
    own, rows = [], {}  # where a batch begins, and the counts of its rows
    for _, first, batch in batches:
        answers = ask(model, batch, False, context)
        right = (answers.logits.argmax(dim=1) == answers.targets).cpu().double()  # MPS has no float64
        row = batch.masked // batch.ids.shape[1]  # (M,)
        counts = torch.zeros(2, len(batch.ids), dtype=torch.float64)
        own.append((first, counts.index_add(1, row, torch.stack([right, torch.ones_like(right)]))))
    for first, counts in chain(*context.gather(own)):
        rows[first] = rows.get(first, 0) + counts
    return torch.cat([rows[first] for first in sorted(rows)], dim=1)


def evaluate(model: Electra | MaskedLM, data: dict, config: Config, context, maskings: int = 1) -> dict:
    """Scores on the validation text of both kinds.

    `translation`: how often the generator is right about one half of a pair, with the whole other half beside it and
    without, the same tokens masked. `layers`: routing statistics of sparse layers. `retrieval`: see there.
    """
    model.eval()
    limits = config.eval_tokens, context.rank, context.world
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    scores = {"loss": 0.0}
    for kind, corpus in data.items():
        batches = corpus.eval_batches("valid", maskings, *limits)
        scores[kind] = score(model, batches, corpus.tokenizer.special, config.objective == "rtd", config, context)
        scores["loss"] += scores[kind]["mlm"] + config.lambda_disc * scores[kind].get("rtd", 0.0)
    scores["layers"] = [watch.finish(context.sum) for watch in watches]
    right = {}  # of the masked tokens of each pair, with the other half beside each half and without
    for name, beside in {"with": True, "without": False}.items():
        halves = []
        for half in (0, 1):
            shown = (0, 1) if beside else (half,)
            batches = data["pairs"].eval_batches("valid", maskings, *limits, masked=(half,), shown=shown)
            halves.append(right_by_row(model, batches, context))
        right[name], masked = (halves[0] + halves[1]).unbind(0)  # (R,) each; the same are masked, with and without
    effect = measures.bootstrap(right["with"] - right["without"], masked)  # 95% interval over pairs
    scores["translation"] = {name: float(rows.sum() / masked.sum()) for name, rows in right.items()} | {
        "effect": effect
    }
    scores |= retrieval(model.encoder, data["pairs"], config, context)
    model.train()
    return scores


def retrieval(encoder: Encoder, pairs: PairData, config: Config, context, most: int = 1000) -> dict:
    """How often the nearest of a language pair's held-out sentences is the translation, as in Tatoeba (table 5).

    The mean over language pairs, of at most `most` sentences each, by layer (0: embeddings); `chance` beside it.
    """
    how = dict(micro_tokens=config.micro_tokens, context=context)
    found, vectors_of = [], partial(measures.sentence_vectors, encoder, pairs.tokenizer, **how)
    for language in pairs.languages[context.rank :: context.world]:
        sides = [side[:most] for side in pairs.texts("valid", language)]
        if sides[0]:
            found.append([*measures.retrieval(*map(vectors_of, sides)).tolist(), 1 / len(sides[0])])
    everyone = chain(*context.gather(found))
    *right, chance = [fmean(column) for column in zip(*everyone)]
    return {"retrieval": right, "chance": chance}


def middle(scores: dict) -> int:
    """The layer whose sentence vectors are shown."""
    return measures.middle_layer(len(scores["retrieval"]) - 1)


def describe(scores: dict) -> str:
    """What one evaluation found: a line for each kind of text, two for both languages together, one a sparse layer."""
    lines = []
    for kind in ("sentences", "pairs"):
        own = scores[kind]
        line = f"held-out {kind}: generator: loss {own['mlm']:.3f}, {own['generator']:.1%} right"
        if "rtd" in own:
            line += f"; discriminator: loss {own['rtd']:.4f}, {own['saved']:.1%} below a blind "
            line += f"guess's, {own['accuracy']:.1%} right, {own['replaced']:.1%} replaced"
        lines.append(line)
    beside, found, layer = scores["translation"], scores["retrieval"], middle(scores)
    low, high = beside["effect"]
    lines.append(
        f"masked tokens of one half of held-out pairs: {beside['with']:.2%} right with the translation beside it, "
        f"{beside['without']:.2%} without; the difference is {low:+.2%} to {high:+.2%} (bootstrap, 95%)"
    )
    lines.append(
        f"held-out translations found: {found[layer]:.1%} by layer {layer} "
        f"({found[0]:.1%} by embeddings, {scores['chance']:.1%} chance)"
    )
    for i, moe in enumerate(scores["layers"], 1):
        balance = f"{scores['sentences']['balance']:.3f}, {scores['pairs']['balance']:.3f}"
        lines.append(f"sparse layer {i}: {measures.describe_routing(moe)}; balance loss of all {balance}")
    return "\n".join(lines)


def describe_counting(right: dict[str, float]) -> str:
    return (
        f"counting is right on {right['tokens']:.1%} of the masked tokens of sentences by the tokens of each language, "
        f"on {right['neighbours']:.1%} by the two beside each as well (first masking)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# One run


def step_flops(model: Electra | MaskedLM) -> float:
    """Training FLOPs of a step, forward and twice that backward; pairs count as rows of block_size tokens, too."""
    config, D = model.config, model.config.n_embd
    rtd = config.objective == "rtd"
    generator = model.generator if rtd else model
    head = config.mask_share * measures.masked_head_flops(generator.config)  # of the masked tokens alone
    batches = 1 + config.tlm  # of sentences, and of pairs
    forward = batches * measures.flops_per_token(generator.encoder, generator.config, head)["total"]
    if rtd:
        head = 2 * D * D + 2 * D
        batches = 1 + (config.tlm and config.trtd)
        forward += batches * measures.flops_per_token(model.encoder, config, head)["total"]
    return 3 * config.batch_tokens * forward


def open_data(config: Config, context) -> dict[str, MaskedData | PairData]:
    """Both corpora. ValueError where their vocabularies differ."""
    options = {"exponent": config.sampling_exponent, "mask_share": config.mask_share, "span": config.span}
    options |= {"replace": (1.0, 0.0)}  # what is masked always becomes the mask token
    sentences = MaskedData.open(config.data, config, context, **options)
    pairs = PairData.open(config.pairs, config, context, **options)
    if sentences.tokenizer.sha256 != pairs.tokenizer.sha256:
        both = f"{sentences.folder} and {pairs.folder}"
        raise ValueError(f"{both} have different tokenizers: prepare both with the same --tokenizer")
    return {"sentences": sentences, "pairs": pairs}


def train(config: Config, context) -> dict:
    """Trains one model, or goes on where it stopped -> its result, as in result.json."""
    with common.clear_errors():
        data = open_data(config, context)
        run = runs.Run(config, PRESETS, context, *data.values())
        if run.result:
            return run.result
        common.seed_all(config.seed)
        # Placed first, so that float64 loads as float64.
        model = common.place(make(runs.with_vocabulary(config, data["pairs"])), context)
        generator = model.generator if config.objective == "rtd" else model
        if config.frequency_bias:
            generator.bias.data.copy_(data["sentences"].log_frequencies())
        if run.checkpoint:
            model.load_state_dict(run.checkpoint["model"])
    kept = [p for name, p in model.named_parameters() if not name.startswith("generator.")]
    parameters = measures.count_parameters(model) | {"kept": sum(p.numel() for p in kept)}
    flops = step_flops(model)
    run.say(
        f"{run.name}: {parameters['total']:,} parameters, {parameters['kept']:,} of them to keep; "
        f"{flops / 1e9:.1f} GFLOPs a step; {len(data['sentences'].languages)} languages, "
        f"{len(data['pairs'].languages)} pairs of them"
    )
    counted = counting.masked_scores(data["sentences"], config.eval_tokens)
    counted = {name: float(right.sum() / many.sum()) for name, (_, right, many) in counted.items()}
    if counted:
        run.say(describe_counting(counted))
    parallel.split(model, config, context)
    optimizer = common.adamw(model, config)
    batches = 1 + config.tlm  # of a step: sentences, and pairs
    forward = run.begin(model, optimizer, flops / 3 / (batches * config.batch_tokens))
    rtd = config.objective == "rtd"
    for step in run.steps():
        common.set_learning_rate(optimizer, common.linear(step, config.steps, config.warmup, config.learning_rate))
        for micro in run.micros(step):
            sentences = data["sentences"].batch("train", step, micro)
            mlm, mrtd, balance = losses(ask(forward, sentences, rtd, context))
            tlm = trtd = more = 0.0
            if config.tlm:
                pairs = data["pairs"].batch("train", step, micro)
                tlm, trtd, more = losses(ask(forward, pairs, rtd and config.trtd, context))
            balance = config.balance_coef * (balance + more)
            loss = mlm + tlm + config.lambda_disc * (mrtd + trtd) + balance  # section 3.2
            run.backward(loss, shown=loss, tokens=batches * config.micro_tokens)
        run.update()
        model.after_step()
        if run.end_step(step):
            scores = evaluate(run.whole(), data, config, context)
            record = {"flops": (step + 1) * flops, "held_out": scores}
            run.save(step, record, scores["loss"], f"{record['flops']:.2e} FLOPs\n{describe(scores)}")
    scores = evaluate(run.whole(), data, config, context, config.eval_maskings)
    result = {"held_out": scores, "counting": counted, "parameters": parameters, "flops": config.steps * flops}
    return run.finish(result)


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    title = f"{result['name']}, {result['flops']:.2e} FLOPs, {config.eval_maskings} maskings"
    counted = result.get("counting")
    return "\n".join(["", title, describe(result["held_out"]), *([describe_counting(counted)] if counted else [])])


def main():
    config, context = runs.start(Config, PRESETS)
    runs.carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
