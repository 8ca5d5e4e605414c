"""XLM-E: cross-lingual pre-training as replaced token detection, with ELECTRA's generator and discriminator.

    python train_electra.py                                          the demo, on sentences and pairs on this disk
    python train_electra.py --objective mlm --relative_bias false    the baseline XLM: a masked LM on the same batches
    python train_electra.py --tlm false                              an ablation: sentences alone, no pairs
    python train_electra.py --router hypersphere                     X-MoE's sparse layers in the discriminator
    python train_electra.py --table 2                                every row of the ablation
    torchrun --nproc_per_node 8 train_electra.py --preset base       the paper's model and schedule, on 8 GPUs

A step has a batch of sentences and one of translation pairs. In both some tokens are masked; the generator fills them
in (MLM on sentences, TLM on pairs), and the discriminator says of every token of the outcome whether it was replaced
(MRTD and TRTD). Prints, at every evaluation, how well both networks do that on held-out text, beside a guess that
looks at nothing; whether a translation helps the generator; and how many held-out sentences have their translation as
the nearest one. A run is kept in out/train_electra/NAME; the same command goes on where it stopped. Whoever loads a
run gets its discriminator without the head. `--help` lists every constant.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis import flops, measures
from data import counting
from data.batches import Masked, MaskedData, PairData
from engine import parallel
from engine.device import clear_errors, seed_all
from engine.optim import adamw, cross_entropy, linear, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from model import Encoder, MaskedLM, SparseModel

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, multilingual, small, or the paper's base, large and xl
    table: int | None = None  # run every row of XLM-E's table 2 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    pairs: str = "catalogs-pairs"  # translation pairs under data/prepared, or the folder of prepared ones
    sampling_exponent: float = 0.7  # alpha of eq. 9: a language is drawn in proportion to its size to this power
    seed: int = 0  # of weights, data order, masks, replaced tokens and dropout
    # what is learned
    objective: Literal["rtd", "mlm"] = "rtd"  # rtd: XLM-E; mlm: a masked LM of n_layer layers, and no discriminator
    tlm: bool = True  # masked LM on translation pairs too
    trtd: bool = True  # replaced token detection on translation pairs too, where TLM has them
    lambda_disc: float = 5.0  # lambda, the weight of the discriminator's losses; 50 holds a young generator back
    mask_share: float = 0.4  # of the tokens is masked; the paper's 0.15 teaches less in so short a run
    span: float | None = None  # mean length of masked spans; None: single tokens (section 3.1 says spans do worse)
    # the model
    generator_layers: int = 2  # layers of the generator, which is as wide as the discriminator
    n_layer: int = 4  # layers of the discriminator, without the sparse ones
    n_head: int = 4  # H
    n_embd: int = 128  # D
    ffn_size: int = 512  # inner width of an FFN
    block_size: int = 128  # T, the longest row
    dropout: float = 0.0  # after embeddings, attention weights, attention and FFN; the sparse layers have none
    init_std: float = 0.02  # of the normal that weights start from
    frequency_bias: bool = True  # the generator's output bias starts at the log frequencies of the training tokens
    relative_bias: bool = True  # gated relative position bias in both networks (section 3.3); the baseline has none
    # experts of the discriminator, or of the masked LM
    router: str = "dense"  # dense, or a name in routers.ROUTERS; hypersphere is X-MoE's
    score: Literal["dot", "hypersphere"] | None = None  # how well a token fits an expert; None: the router's
    gate: Literal["softmax", "sigmoid"] | None = None  # the weight of a chosen expert; None: the router's
    moe_after: tuple[int, ...] = (2,)  # a sparse layer stands behind each of these layers, counted from 1
    experts: int = 32  # E
    expert_size: int = 128  # F, the inner width of an expert's FFNs
    expert_layers: int = 3  # FFNs of an expert, each with a norm and a residual around it; 0: one FFN without them
    top_k: int = 1  # K, experts per token
    capacity_factor: float = float("inf")  # gamma: an expert serves gamma * S / E of S tokens at most; inf: no limit
    eval_capacity_factor: float | None = None  # gamma at test; None: the same
    threshold: float = 0.9  # t of XMoE's router, the probability that the chosen experts must reach together
    eval_threshold: float | None = None  # t at test; None: the same
    routing_dim: int | None = None  # d_e, what the router projects to; 0: nothing; None: on a hypersphere E / 2
    init_temperature: float | None = None  # tau_0 of a hypersphere; None: the gate's
    router_std: float = 0.02  # of the normal that the router's projection starts from
    balance_coef: float = 0.01  # the weight of the balance loss
    # training
    steps: int = 8000  # optimizer steps
    batch_tokens: int = 512  # tokens of a step, over all processes, for sentences and again for pairs
    micro_tokens: int = 512  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1.5e-3  # peak
    distance_lr: float = 10.0  # the relative bias learns at so many times the rate: else it hardly grows in this time
    warmup: float = 0.1  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam; in small batches a token is rare: its gradient must be remembered
    eps: float = 1e-9  # Adam; the gradients of rare tokens are small
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit
    eval_every: int = 1000  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 14  # validation tokens of sentences, and of pairs, at most (retrieval has its own limit)
    eval_maskings: int = 10  # the final scores are means over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    # where and how
    out_dir: str = "out/train_electra"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    expert_parallel: int = 1  # processes that share out the experts of one model, see engine/parallel.py
    shard: bool = False  # weights and their state lie in pieces over all processes (FSDP2)
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again

    def unread(self) -> set[str]:
        """Constants that a run does not read because of others: see engine/config.py."""
        names = set()
        if not self.relative_bias:
            names |= {"distance_lr"}
        if not self.tlm:
            names |= {"trtd"}
        if self.objective == "mlm":
            names |= {"trtd", "lambda_disc", "generator_layers"}
        return names


# XLM-E appendices A and B; micro-batches are ours. Of Large and XL the text says that they have a vocabulary of 500K,
# but only one of 2^19 gives the parameters of table 3.
BASE = dict(
    data="cc100",
    pairs="opus100",
    lambda_disc=50.0,
    mask_share=0.15,
    generator_layers=4,
    n_layer=12,
    n_head=12,
    n_embd=768,
    ffn_size=3072,
    block_size=512,
    dropout=0.1,
    frequency_bias=False,
    moe_after=(6,),
    steps=125_000,
    batch_tokens=2048 * 512,
    micro_tokens=32 * 512,
    learning_rate=5e-4,
    distance_lr=1.0,
    warmup=0.08,
    beta2=0.98,
    eps=1e-6,
    eval_every=5000,
    eval_tokens=1 << 25,
)
LARGE = dict(generator_layers=6, n_layer=24, n_head=16, n_embd=1024, ffn_size=4096, moe_after=(12,))
XL = dict(generator_layers=8, n_layer=48, n_head=24, n_embd=1536, ffn_size=6144, moe_after=(24,))
PRESETS = {
    "demo": {},
    # Real text and pairs in four languages; `python -m data.multilingual` prepares them.
    "multilingual": dict(data="multilingual", pairs="multilingual-pairs"),
    # Twice the width. At the demo's learning rate it hardly learned, before it had this lambda, beta2 and eps.
    "small": dict(n_embd=256, ffn_size=1024, learning_rate=7.5e-4),
    "base": BASE,
    "large": BASE | LARGE,
    "xl": BASE | XL,
}

# ---------------------------------------------------------------------------------------------------------------------
# Table 2

# A step of XLM-E costs as many FLOPs as so many of XLM, with the preset's own sizes and vocabulary.
EQUAL_FLOPS = {"demo": 1.354, "multilingual": 1.270, "small": 1.414, "base": 1.260, "large": 1.203, "xl": 1.155}


def table2(base: Config) -> Table:
    """Without TRTD, without the gated bias, and XLM. The paper's numbers are XNLI, MLQA (F1 / EM) after fine-tuning.

    XLM, and XLM-E without pairs, stand here with XLM-E's steps and once more with its FLOPs. Where sizes are changed
    on the command line these are not quite equal: the column of FLOPs tells how far off they are.
    """
    more = EQUAL_FLOPS[base.preset]
    xlm = dict(objective="mlm", relative_bias=False)
    longer = dict(steps=round(more * base.steps))
    sentences = dict(tlm=False)
    rows = [
        (("XLM", "?, 66.2 / 47.8"), xlm),
        ((f"XLM, {more} x the steps", ""), xlm | longer),
        ((f"XLM with the bias, {more} x the steps", ""), dict(objective="mlm") | longer),
        (("XLM - TLM", "?, 64.0 / 46.0"), xlm | sentences),
        (("XLM-E", "76.6, 68.3 / 49.8"), dict(trtd=True)),
        (("XLM-E - TRTD", "75.1, 67.8 / 49.7"), sentences),
        (("XLM-E - TRTD, 2 x the steps", ""), sentences | dict(steps=2 * base.steps)),
        (("XLM-E - TRTD - gate", "?, 67.4 / 49.2"), sentences | dict(relative_bias=False)),
    ]
    return Table("XLM-E table 2, pre-training: held-out text", ("model", "paper: XNLI, MLQA"), rows)


TABLES = {2: table2}


def cells(result: dict) -> dict:
    """A row of the table."""
    scores = result["held_out"]
    sentences, pairs, translation = scores["sentences"], scores["pairs"], scores["translation"]
    return {
        "params, M": (result["parameters"]["kept"] / 1e6, ".1f"),
        "FLOPs": (result["flops"], ".2e"),
        "masked tokens right": (sentences["generator"], ".1%"),
        "in pairs": (pairs["generator"], ".1%"),
        "loss saved": (sentences.get("saved"), ".1%"),
        "saved in pairs": (pairs.get("saved"), ".1%"),
        "translation adds": (translation["with"] - translation["without"], "+.2%"),
        "translations found": (scores["retrieval"][middle(scores)], ".1%"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The two networks


class Electra(SparseModel):
    """A discriminator and a generator (sections 2 and 3), which share token and position embeddings, as in ELECTRA."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.encoder = Encoder(config, V)
        self.dense = nn.Linear(D, D)
        self.ln_h = nn.LayerNorm(D)
        self.out = nn.Linear(D, 1)
        for linear_layer in (self.dense, self.out):
            nn.init.normal_(linear_layer.weight, std=config.init_std)
            nn.init.zeros_(linear_layer.bias)
        smaller = {"n_layer": config.generator_layers, "router": "dense"}
        self.generator = MaskedLM(SimpleNamespace(**vars(config) | smaller), V)
        self.generator.encoder.wte = self.encoder.wte
        self.generator.encoder.wpe = self.encoder.wpe

    def forward(self, ids: Tensor, masked: Tensor, real: Tensor | None = None, targets: Tensor | None = None):
        """The generator's logits (M, V) and the balance loss; with `targets` the discriminator's verdicts as well.

        ids (B, T) after masking; masked (M,) places in B * T; real (S,) as in `Encoder`; targets (M,) what stood there.
        The verdicts are logits (S,), above 0 where a token seems replaced, and whether it was, (S,) bool.
        """
        logits, balance = self.generator(ids, masked, real)
        if targets is None:
            return logits, balance
        drawn = sample(logits)  # (M,)
        corrupt = ids.flatten().index_copy(0, masked, drawn)  # (B * T,), eqs. 2 and 4
        h, balance = self.encoder(corrupt.view_as(ids), real)  # (B, T, D)
        verdicts = self.out(self.ln_h(F.gelu(self.dense(h)))).flatten()  # (B * T,)
        # A token that was drawn as it stood there counts as original.
        replaced = torch.zeros_like(corrupt, dtype=torch.bool).index_copy(0, masked, drawn != targets)  # (B * T,)
        if real is not None:
            verdicts, replaced = verdicts[real], replaced[real]  # (S,)
        return logits, balance, verdicts, replaced


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """(M,) tokens from softmax(logits), (M, V), without gradient: each is the largest of V logits with Gumbel noise.

    torch.multinomial is slower, and meets a NaN with an assertion on the device.
    """
    logits = logits.float()
    return (logits - torch.rand_like(logits).log_().neg_().log_()).argmax(dim=1)


Model = Electra | MaskedLM  # XLM-E's two networks, or the one of its baseline


def make(config, V: int) -> Model:
    return Electra(config, V) if config.objective == "rtd" else MaskedLM(config, V)


def generator_of(model: Model) -> MaskedLM:
    """What fills in masked tokens; of the baseline all of it."""
    return model.generator if isinstance(model, Electra) else model


# ---------------------------------------------------------------------------------------------------------------------
# Losses


class Answers(NamedTuple):
    """What the networks say of a batch of S tokens, M of them masked."""

    targets: Tensor  # (M,) what the masked tokens are
    logits: Tensor  # (M, V) of what they are
    balance: Tensor  # the balance loss
    verdicts: Tensor | None = None  # (S,) logits, above 0 where a token seems replaced; None where nobody judged
    replaced: Tensor | None = None  # (S,) bool, whether it was

    @property
    def right(self) -> Tensor:
        """(M,) bool: which masked tokens the generator finds most probable."""
        return self.logits.argmax(dim=1) == self.targets


def ask(forward, batch: Masked, detect: bool, context) -> Answers:
    """The generator (or the baseline) fills in the batch; with `detect` the discriminator judges the outcome."""
    ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
    inputs = [ids, masked, real]
    if detect:
        inputs.append(targets)
    with context.autocast():
        return Answers(targets, *forward(*inputs))


def losses(answers: Answers) -> tuple[Tensor, Tensor | float, Tensor]:
    """MLM or TLM, the mean over masked tokens; MRTD or TRTD, the mean over all (0: nobody judged); the balance loss."""
    total = cross_entropy(answers.logits, answers.targets, reduction="sum")
    mlm = total / max(1, len(answers.targets))  # eq. 1
    if answers.verdicts is None:
        return mlm, 0.0, answers.balance
    verdicts, truth = answers.verdicts.to(mlm.dtype), answers.replaced.to(mlm.dtype)
    rtd = F.binary_cross_entropy_with_logits(verdicts, truth)  # eqs. 3, 5
    return mlm, rtd, answers.balance


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def score(model: Model, batches: Iterable, special: Iterable[int], config: Config, context) -> dict[str, float]:
    """Mean losses and shares of right answers, over all batches of all processes; each batch's draws are fixed.

    saved: by how much the discriminator's loss is below that of a blind guess. Such a guess knows that `special` ids
    are never masked, and which share of the other tokens is replaced; 0 means that nothing more has been learned.
    """
    detect, special = config.objective == "rtd", torch.tensor([*special])
    own, sums = Counter(), Counter()  # of this process, and of all
    for masking, first, batch in batches:
        seed_all(config.seed, masking, first, 3)  # training has keys of three numbers
        answers = ask(model, batch, detect, context)
        mlm, rtd, balance = losses(answers)
        M = len(answers.targets)
        own.update(masked=M, mlm=M * float(mlm), balance=M * float(balance))
        own["generator"] += int(answers.right.sum())
        shown = batch.ids.flatten()  # (S,) without padding
        if batch.real is not None:
            shown = shown[batch.real]
        ordinary = len(shown) - int(torch.isin(shown, special).sum())  # a mask is special, what it hides is not
        own.update(tokens=len(shown), maskable=M + ordinary)
        if detect:
            correct = (answers.verdicts > 0) == answers.replaced  # (S,)
            own.update(rtd=len(shown) * float(rtd), accuracy=int(correct.sum()))
            own["replaced"] += int(answers.replaced.sum())
    for part in context.gather(own):
        sums.update(part)
    scores = {"masked": sums["masked"], "tokens": sums["tokens"]}
    for name in ("mlm", "generator", "balance"):
        scores[name] = sums[name] / max(1, sums["masked"])
    if detect:
        for name in ("rtd", "accuracy", "replaced"):
            scores[name] = sums[name] / sums["tokens"]
        share = sums["replaced"] / max(1, sums["maskable"])
        of_maskable = sum(p * math.log(p) for p in (share, 1 - share) if p)
        blind = -sums["maskable"] / sums["tokens"] * of_maskable
        scores["saved"] = 1 - scores["rtd"] / blind if blind else 0.0
    return scores


def evaluate(model: Model, data: dict, config: Config, context, maskings: int = 1) -> dict:
    """Scores on the validation text of both kinds.

    `layers`: routing statistics of sparse layers. `translation` and `retrieval`: see the functions below.
    """
    model.eval()
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    scores = {"loss": 0.0}
    for kind, corpus in data.items():
        batches = corpus.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world)
        own = score(model, batches, corpus.tokenizer.special, config, context)
        scores["loss"] += own["mlm"] + config.lambda_disc * own.get("rtd", 0.0)
        scores[kind] = own
    scores["layers"] = [watch.finish(context.sum) for watch in watches]
    scores["translation"] = translation_effect(model, data["pairs"], config, context, maskings)
    scores |= retrieval(model.encoder, data["pairs"], config, context)
    model.train()
    return scores


def translation_effect(model: Model, pairs: PairData, config: Config, context, maskings: int) -> dict:
    """How often the generator is right about one half of a pair, with the whole other half beside it and without.

    The same tokens are masked both times. effect: the 95% interval of the difference over pairs.
    """
    right = {}  # (R,) of each pair the masked tokens that are right
    for name, beside in {"with": True, "without": False}.items():
        halves = []
        for half in (0, 1):
            limits = config.eval_tokens, context.rank, context.world
            shown = (0, 1) if beside else (half,)
            batches = pairs.eval_batches("valid", maskings, *limits, masked=(half,), shown=shown)
            halves.append(right_by_row(model, batches, context))
        right[name], masked = halves[0] + halves[1]
    difference = right["with"] - right["without"]
    found = {name: float(rows.sum() / masked.sum()) for name, rows in right.items()}
    return found | {"effect": measures.bootstrap(difference, masked)}


@torch.no_grad()
def right_by_row(model: Model, batches: Iterable, context) -> Tensor:
    """(2, R): of each row the masked tokens that the generator has right, and how many there are, over all maskings."""
    own, rows = [], {}  # where a batch begins, and the counts of its rows
    for _, first, batch in batches:
        right = ask(model, batch, False, context).right.cpu().double()  # MPS has no float64
        both = torch.stack([right, torch.ones_like(right)])  # (2, M)
        row = batch.masked // batch.ids.shape[1]  # (M,)
        counts = torch.zeros(2, len(batch.ids), dtype=torch.float64)
        own.append((first, counts.index_add(1, row, both)))
    for first, counts in chain(*context.gather(own)):
        rows[first] = rows.get(first, 0) + counts
    return torch.cat([rows[first] for first in sorted(rows)], dim=1)


def retrieval(encoder: Encoder, pairs: PairData, config: Config, context, most: int = 1000) -> dict:
    """How often the nearest of a language pair's held-out sentences is the translation, as in Tatoeba (table 5).

    The mean over language pairs, of at most `most` sentences each, by layer (0: embeddings); `chance` beside it.
    """
    how = dict(micro_tokens=config.micro_tokens, context=context)
    found = []
    for language in pairs.languages[context.rank :: context.world]:
        texts = [side[:most] for side in pairs.texts("valid", language)]
        if texts[0]:
            vectors = [measures.sentence_vectors(encoder, pairs.tokenizer, side, **how) for side in texts]
            found.append([*measures.retrieval(*vectors).tolist(), 1 / len(texts[0])])
    everyone = chain(*context.gather(found))
    *right, chance = [fmean(column) for column in zip(*everyone)]
    return {"retrieval": right, "chance": chance}


def middle(scores: dict) -> int:
    """The layer whose sentence vectors are shown."""
    return measures.middle_layer(len(scores["retrieval"]) - 1)


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Trains (or goes on training) one model -> its result, which is also in result.json."""
    with clear_errors():
        data = open_data(config, context)
        run = Run(config, PRESETS, context, *data.values())
    if run.result:
        return run.result
    with clear_errors():
        model = build(config, data, context)
        work = step_flops(model)
        counts = describe_size(run, model, data, work)
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        kinds = 1 + config.tlm  # of batches: sentences, and pairs
        run.resume(model, optimizer, flops_per_token=work / 3 / (kinds * config.batch_tokens))
    rtd = config.objective == "rtd"
    for step in run.steps():
        set_learning_rate(optimizer, linear(step, config.steps, config.warmup, config.learning_rate))
        for micro in run.micros:
            seed_all(config.seed, 1 + step, micro)  # all that is random: so a resumed run is the same run
            forward.require_backward_grad_sync = micro == run.micros[-1]  # processes exchange gradients once
            sentences = data["sentences"].batch("train", step, micro)
            mlm, mrtd, balance = losses(ask(forward, sentences, rtd, context))
            tlm = trtd = more = 0.0
            if config.tlm:
                pairs = data["pairs"].batch("train", step, micro)
                tlm, trtd, more = losses(ask(forward, pairs, rtd and config.trtd, context))
            loss = mlm + tlm + config.lambda_disc * (mrtd + trtd)  # section 3.2
            loss = loss + config.balance_coef * (balance + more)
            (loss / len(run.micros)).backward()
            run.add(loss, tokens=kinds * config.micro_tokens)
        parallel.clip_grad_norm_(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()  # restores what a router keeps fixed: a hypersphere its norms, the others nothing
        if run.due(step + 1):
            scores = evaluate(parallel.whole(model), data, config, context)
            record = {"flops": (step + 1) * work, "held_out": scores}
            run.save(step + 1, record, scores["loss"], f"{record['flops']:.2e} FLOPs\n{describe(scores)}")
    scores = evaluate(parallel.whole(model), data, config, context, config.eval_maskings)
    counts["flops"] = config.steps * work
    return run.finish({"held_out": scores} | counts)


def open_data(config: Config, context) -> dict[str, MaskedData | PairData]:
    """Both corpora. Raises ValueError where their vocabularies differ."""
    options = {"exponent": config.sampling_exponent, "mask_share": config.mask_share, "span": config.span}
    options["replace"] = 1.0, 0.0  # what is masked always becomes the mask token
    sentences = MaskedData.open(config.data, config, context, **options)
    pairs = PairData.open(config.pairs, config, context, **options)
    if sentences.tokenizer.sha256 != pairs.tokenizer.sha256:
        both = f"{sentences.folder} and {pairs.folder}"
        raise ValueError(f"{both} have different tokenizers: prepare both with the same --tokenizer")
    return {"sentences": sentences, "pairs": pairs}


def build(config: Config, data: dict, context) -> Model:
    """The model drawn from the seed."""
    seed_all(config.seed)
    model = context.place(make(config, data["pairs"].vocab_size))
    if config.frequency_bias:
        generator_of(model).bias.data.copy_(data["sentences"].log_frequencies())
    return model


def step_flops(model: Model) -> float:
    """Training FLOPs of a step, forward and twice that backward; pairs count as rows of block_size tokens, too."""
    config, D = model.config, model.config.n_embd
    generator = generator_of(model)
    head = config.mask_share * flops.masked_head_flops(generator)  # only masked tokens pass through it
    batches = 1 + config.tlm  # of sentences, and of pairs
    forward = batches * flops.flops_per_token(generator.encoder, generator.config, head)["total"]
    if config.objective == "rtd":
        head = 2 * D * D + 2 * D
        batches = 1 + (config.tlm and config.trtd)
        forward += batches * flops.flops_per_token(model.encoder, config, head)["total"]
    return 3 * config.batch_tokens * forward


def describe_size(run: Run, model: Model, data: dict, work: float) -> dict:
    """Prints the model's size and its work, and what counting reaches on the same sentences; returns size and that."""
    parameters = flops.count_parameters(model)
    kept = [p.numel() for name, p in model.named_parameters() if not name.startswith("generator.")]
    parameters["kept"] = sum(kept)  # the generator is thrown away when it has done its work
    run.context.say(
        f"{run.name}: {parameters['total']:,} parameters, {parameters['kept']:,} of them to keep; "
        f"{work / 1e9:.1f} GFLOPs a step; {len(data['sentences'].languages)} languages, "
        f"{len(data['pairs'].languages)} pairs of them"
    )
    counted = {}
    for name, (_, right, many) in counting.masked_scores(data["sentences"], run.config.eval_tokens).items():
        counted[name] = float(right.sum() / many.sum())
    if counted:
        run.context.say(describe_counting(counted))
    return {"counting": counted, "parameters": parameters}


# ---------------------------------------------------------------------------------------------------------------------
# Words


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


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    title = f"{result['name']}, {result['flops']:.2e} FLOPs, {config.eval_maskings} maskings"
    lines = ["", title, describe(result["held_out"])]
    if result["counting"]:
        lines.append(describe_counting(result["counting"]))
    return "\n".join(lines)


def main():
    config, context = start(Config, PRESETS)
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
