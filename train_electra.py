"""XLM-E: cross-lingual pre-training as replaced token detection, with ELECTRA's generator and discriminator.

    python train_electra.py                                        the demo, on sentences and pairs on this disk
    python train_electra.py --objective mlm                        the baseline: XLM, a masked LM on the same batches
    python train_electra.py --tlm false                            sentences alone; --relative_bias false: no gate
    python train_electra.py --router hypersphere                   sparse layers in the discriminator, any router
    torchrun --nproc_per_node 8 train_electra.py --preset base     the paper's model and schedule, on 8 GPUs
    python train_electra.py --table 2                              every row of the ablation
    python train_electra.py --figure 1                             accuracy against FLOPs, XLM-E and the baseline
    python train_electra.py --flops true                           parameters and FLOPs of the paper's sizes

A step has a batch of sentences (MLM, MRTD) and one of translation pairs (TLM, TRTD). The generator fills in the masked
tokens; the discriminator says of every token whether it was replaced. Prints, at every evaluation, how both do on both
kinds of text, beside the best blind guess; whether a translation helps the generator; and how many held-out sentences
have their translation as the nearest. A run is kept in out/train_electra/NAME; the same command goes on where it
stopped. The checkpoint's `encoder.` is the discriminator. `--help` lists every constant.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import measures
import runs
from data.batches import Masked, MaskedData, PairData
from data.prepare import ready
from model import Encoder, MaskedLM, ModelConfig, SparseModel

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config(ModelConfig):
    preset: str = "demo"  # demo, or the paper's base, large and xl
    table: int | None = None  # run every row of XLM-E's table 2 at the preset's scale
    figure: Literal[1] | None = None  # draw XLM-E's figure 1 from the runs of XLM-E and of its baseline
    flops: bool = False  # print parameters and FLOPs of the paper's sizes (tables 3 and 4)
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    pairs: str = "catalogs-pairs"  # translation pairs under data/prepared, or the folder of prepared ones
    spm: str | None = None  # SentencePiece model for catalogs, such as XLM-R's; None: one trained on them
    sampling_exponent: float = 0.7  # alpha of eq. 9: a language is drawn in proportion to its size to this power
    objective: Literal["rtd", "mlm"] = "rtd"  # rtd: XLM-E; mlm: its baseline XLM, a masked LM of n_layer layers
    tlm: bool = True  # masked LM on translation pairs as well
    trtd: bool | None = None  # replaced token detection on translation pairs as well; None: with rtd and tlm
    lambda_disc: float = 50.0  # lambda, the weight of the discriminator's losses
    mask_share: float = 0.15  # of the tokens are masked; of a pair, in each half
    span: float | None = None  # mean length of masked spans; None: single tokens (section 3.1: spans do worse)
    generator_layers: int = 2  # of the generator, which is as wide as the discriminator
    init_std: float = 0.02  # of the normal that weights start from
    relative_bias: bool | None = None  # gated relative position bias (section 3.3), in both networks; None: with rtd
    # of the discriminator, or of the baseline: hypersphere is X-MoE's
    router: Literal["dense", "switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice"] = "dense"
    moe_after: tuple[int, ...] = (2,)  # sparse layers stand behind these layers, from 1
    seed: int = 0  # of weights, data order, masks, replaced tokens and dropout
    steps: int = 2000  # optimizer steps
    batch_tokens: int = 1024  # tokens of a step, over all processes, for sentences and again for pairs
    micro_tokens: int = 1024  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1.5e-3  # peak
    warmup: float = 0.2  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.98  # Adam
    eps: float = 1e-6  # Adam
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit
    balance_coef: float = 0.01  # the weight of the balance loss, where there are sparse layers
    eval_every: int = 250  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 14  # validation tokens of sentences, and of pairs, at most (retrieval has its own limit)
    eval_maskings: int = 10  # the final scores are means over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_electra"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again

    # Constants of other models: as a ClassVar a constant is no option of this script, and nothing reads it.
    moe_every: ClassVar = 2
    expert_ffns: ClassVar = 8
    decoder_layers: ClassVar = 0
    decoder_moe: ClassVar = True

    not_identity: ClassVar = {"figure", "flops"}

    def __post_init__(self):
        super().__post_init__()
        if self.trtd is not None and not self.tlm:
            raise ValueError("--trtd needs --tlm true: its generator must learn from pairs")
        if self.router != "dense" and not self.moe_after:
            raise ValueError(f"--router {self.router} needs --moe_after: the layers that sparse ones stand behind")

    def unread(self) -> set[str]:
        names = super().unread()
        if self.objective == "mlm":
            names |= {"lambda_disc", "trtd", "generator_layers"}
        return names

    @property
    def detects(self) -> dict[str, bool]:
        """What a step trains on: a kind of text -> whether the discriminator is trained on it too."""
        kinds = {"sentences": self.objective == "rtd"}
        if self.tlm:
            kinds["pairs"] = kinds["sentences"] and self.trtd is not False
        return kinds


# XLM-E appendices A and B; micro-batches are ours. Of Large and XL the text says that they have a vocabulary of 500K,
# but only one of 2^19 gives the parameters of table 3.
BASE = dict(block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, generator_layers=4, dropout=0.1)
BASE |= dict(data="cc100", pairs="opus100", steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512)
BASE |= dict(learning_rate=5e-4, warmup=0.08, eval_every=5000, eval_tokens=1 << 25, moe_after=(6,))
LARGE = dict(n_layer=24, n_head=16, n_embd=1024, ffn_size=4096, generator_layers=6, moe_after=(12,))
XL = dict(n_layer=48, n_head=24, n_embd=1536, ffn_size=6144, generator_layers=8, moe_after=(24,))
LARGE |= dict(vocab_size=1 << 19)
XL |= dict(vocab_size=1 << 19)
PRESETS = {"demo": dict(block_size=128, n_embd=128, ffn_size=512), "base": BASE, "large": BASE | LARGE, "xl": BASE | XL}

TABLE2 = [  # what to change, and the paper's numbers after fine-tuning: XNLI, MLQA (F1 / EM)
    ("XLM", dict(objective="mlm"), "66.2 / 47.8"),
    ("XLM - TLM", dict(objective="mlm", tlm=False), "64.0 / 46.0"),
    ("XLM-E", dict(trtd=None), "76.6, 68.3 / 49.8"),
    ("XLM-E - TRTD", dict(tlm=False), "75.1, 67.8 / 49.7"),
    ("XLM-E - TRTD - gate", dict(tlm=False, relative_bias=False), "67.4 / 49.2"),
]
SIZES = {"base": "279M", "large": "840M", "xl": "2.2B"}  # table 3


def table2(base: Config) -> runs.Table:
    """Without TRTD, without the gated bias, and XLM."""
    rows = [((name, paper), change) for name, change, paper in TABLE2]
    return runs.Table("XLM-E table 2, pre-training: held-out text", ("model", "paper: XNLI, MLQA"), rows, cells)


def cells(result: dict) -> dict:
    """A row of the table."""
    scores = result["held_out"]
    sentences, pairs = scores["sentences"], scores["pairs"]
    return {
        "params, M": (result["parameters"]["kept"] / 1e6, ".1f"),
        "FLOPs": (result["flops"][PRODUCTS], ".2e"),
        "masked tokens right": (sentences["generator"], ".1%"),
        "in pairs": (pairs["generator"], ".1%"),
        "F1": (sentences.get("f1"), ".3f"),
        "F1 in pairs": (pairs.get("f1"), ".3f"),
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
        self.dense, self.ln_h, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 1)
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
    rtd = config.objective == "rtd"
    gated = rtd if config.relative_bias is None else config.relative_bias
    return (Electra if rtd else MaskedLM)(dataclasses.replace(config, relative_bias=gated))


def kept_parameters(model: Electra | MaskedLM) -> int:
    """Parameters of what one keeps: the discriminator with its head, or the whole baseline."""
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("generator."))


# ---------------------------------------------------------------------------------------------------------------------
# Losses, and the scores that are made with them

KINDS = "sentences", "pairs"


def losses(forward, batch: Masked, detect: bool, context, sums: Counter) -> tuple[Tensor, Tensor | float, Tensor]:
    """The networks on one batch -> its MLM or TLM loss, its MRTD or TRTD loss (0 without `detect`), its balance loss.

    What `scores_of` needs is added to `sums`, on the device, so that nobody waits for it.
    """
    ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
    with context.autocast():
        if detect:
            logits, balance, answers, replaced = forward(ids, masked, real, targets)
        else:
            logits, balance = forward(ids, masked, real)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = ids.numel() if real is None else len(real)
    mlm = F.cross_entropy(logits, targets, reduction="sum")  # eq. 1
    guessed = logits.argmax(dim=1) == targets
    sums.update(mlm=mlm.detach(), masked=len(targets), guessed=guessed.sum())
    sums.update(tokens=tokens, balance=tokens * balance.detach())
    rtd = 0.0
    if detect:
        answers = answers.to(logits.dtype)
        truth, called = replaced.to(answers.dtype), answers > 0
        rtd = F.binary_cross_entropy_with_logits(answers, truth, reduction="sum")  # eqs. 3, 5
        sums.update(rtd=rtd.detach(), right=(called == replaced).sum())
        sums.update(replaced=replaced.sum(), called=called.sum(), found=(called & replaced).sum())
    return mlm / max(1, len(targets)), rtd / tokens, balance


def scores_of(sums: Counter, context) -> dict[str, float]:
    """Losses and shares over all processes; blind_f1: the best F1 of an answer that sees no text."""
    total = Counter()
    for one in context.gather({name: float(x) for name, x in sums.items()}):
        total.update(one)
    tokens, masked = total["tokens"], max(1.0, total["masked"])
    scores = {
        "mlm": total["mlm"] / masked,
        "generator": total["guessed"] / masked,
        "balance": total["balance"] / tokens,
    }
    scores |= {"masked": int(total["masked"]), "tokens": int(tokens)}
    if "rtd" in total:
        share = total["replaced"] / tokens
        scores |= {"rtd": total["rtd"] / tokens, "accuracy": total["right"] / tokens, "replaced": share}
        scores["f1"] = 2 * total["found"] / max(1.0, total["called"] + total["replaced"])
        scores["blind_f1"] = 2 * share / (1 + share)  # which says "replaced" of every token
    return scores


def tally(model: Electra | MaskedLM, batches: Iterable, detect: bool, config: Config, context) -> dict[str, float]:
    """The scores of all batches of all processes; each batch's draws are fixed."""
    sums = Counter()
    for masking, first, batch in batches:
        common.seed_all(config.seed, masking, first, 3)  # training has keys of three numbers
        losses(model, batch, detect, context, sums)
    return scores_of(sums, context)


@torch.no_grad()
def evaluate(model: Electra | MaskedLM, data: dict, config: Config, context, maskings: int = 1) -> dict:
    """Scores on the validation text of both kinds.

    `translation`: how often the generator is right about one half of a pair, with the whole other half beside it and
    without, the same tokens masked. `layers`: routing statistics of sparse layers. `retrieval`: see there.
    """
    model.eval()
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    some = config.eval_tokens, context.rank, context.world
    scores = {"loss": 0.0}
    for kind in KINDS:
        batches = data[kind].eval_batches("valid", maskings, *some)
        scores[kind] = tally(model, batches, config.objective == "rtd", config, context)
        scores["loss"] += scores[kind]["mlm"] + config.lambda_disc * scores[kind].get("rtd", 0.0)
    scores["layers"] = [watch.finish(context.sum) for watch in watches]
    scores["translation"] = {}
    for name, beside in {"with": True, "without": False}.items():
        halves = [data["pairs"].eval_batches("valid", maskings, *some, half, beside) for half in (0, 1)]
        scores["translation"][name] = tally(model, chain(*halves), False, config, context)["generator"]
    scores |= retrieval(model.encoder, data["pairs"], config, context)
    model.train()
    return scores


def retrieval(encoder: Encoder, pairs: PairData, config: Config, context, most: int = 1000) -> dict:
    """How often the nearest of a language pair's held-out sentences is the translation, as in Tatoeba (table 5).

    The mean over language pairs, of at most `most` sentences each, by layer (0: embeddings); `chance` beside it.
    """
    bos, eos, T = pairs.tokenizer.bos, pairs.tokenizer.eos, config.block_size
    found = []
    for language in pairs.languages[context.rank :: context.world]:
        rows = list(islice(pairs.raw("valid", language), most))
        vectors = []
        for side in zip(*rows):
            texts = [[bos, *text[: T - 2], eos] for text in side]
            vectors.append(measures.sentence_vectors(encoder, texts, config.micro_tokens, context))  # (L + 1, n, D)
        if rows:
            found.append([*measures.retrieval(*vectors).tolist(), 1 / len(rows)])
    everyone = chain(*context.gather(found))
    *right, chance = [fmean(column) for column in zip(*everyone)]
    return {"retrieval": right, "chance": chance}


def middle(scores: dict) -> int:
    """The layer whose sentence vectors are shown: the 9th of 12, as in section 4.6."""
    return round(0.75 * (len(scores["retrieval"]) - 1))


def describe(scores: dict, seen: dict) -> str:
    """A line for each kind of text, seen and held out, and what follows from them."""
    texts = {f"seen {kind}": own for kind, own in seen.items()}
    texts |= {f"held-out {kind}": scores[kind] for kind in KINDS}
    lines = []
    for text, own in texts.items():
        line = f"{text}: generator: loss {own['mlm']:.3f}, {own['generator']:.1%} right"
        if "rtd" in own:
            line += f"; discriminator: loss {own['rtd']:.4f}, {own['accuracy']:.1%} right, F1 {own['f1']:.3f} "
            line += f"(blind guess {own['blind_f1']:.3f}), {own['replaced']:.1%} really replaced"
        lines.append(line)
    beside, found, layer = scores["translation"], scores["retrieval"], middle(scores)
    lines.append(
        f"masked tokens of one half of held-out pairs: {beside['with']:.2%} right with the translation beside it, "
        f"{beside['without']:.2%} without; held-out translations found: {found[layer]:.1%} by layer {layer} "
        f"({found[0]:.1%} by embeddings, {scores['chance']:.1%} chance)"
    )
    for i, moe in enumerate(scores["layers"], 1):
        balance = ", ".join(f"{scores[kind]['balance']:.3f}" for kind in KINDS)
        lines.append(f"sparse layer {i}: {measures.describe_routing(moe)}; balance loss of all {balance}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs

WAYS = "ELECTRA's script", "ELECTRA's, our vocabulary", "products, backward twice"  # to count them
PRODUCTS = WAYS[2]


def training_flops(model: Electra | MaskedLM, config: Config) -> tuple[float, float]:
    """Products of one token in the generator, which the baseline counts as, and in the discriminator (0: none)."""
    D, V = config.n_embd, model.config.vocab_size
    predicting = config.mask_share * (2 * D * V + 2 * D * D)
    judging = 2 * D * D + 2 * D
    if isinstance(model, MaskedLM):
        return 3 * measures.flops_per_token(model.encoder, config, predicting)["total"], 0.0
    generator = measures.flops_per_token(model.generator.encoder, model.generator.config, predicting)
    discriminator = measures.flops_per_token(model.encoder, config, judging)
    return 3 * generator["total"], 3 * discriminator["total"]


def step_flops(model: Electra | MaskedLM, config: Config) -> float:
    """Of a training step; pairs, too, attend over block_size positions in this count."""
    generator, discriminator = training_flops(model, config)
    kinds = config.detects.values()
    return config.batch_tokens * (len(kinds) * generator + sum(kinds) * discriminator)


def table3() -> str:
    """XLM-E's table 3: parameters of the discriminator with its head, ours beside the paper's."""
    rows = []
    for preset, paper in SIZES.items():
        config, model = on_paper(preset)
        bias = [p.numel() for name, p in model.encoder.named_parameters() if "gate" in name or "distance" in name]
        kept = kept_parameters(model)
        rows.append([preset, f"{config.vocab_size:,}", paper, f"{kept:,}", f"{kept - sum(bias):,}"])
    table = runs.markdown_table(["preset", "vocabulary", "paper", "ours", "ours without the gated bias"], rows)
    return f"XLM-E table 3: parameters of the discriminator with its head\n\n{table}"


def table4() -> str:
    """XLM-E's table 4: training FLOPs of the base model, counted in three ways, beside the paper's."""
    config, model = on_paper("base")
    networks = (model.generator.config, False), (config, True)
    ways = [
        [measures.electra_flops(*network, 30_522, lookup=True) for network in networks],
        [measures.electra_flops(*network, config.vocab_size, lookup=False) for network in networks],
        training_flops(model, config),
    ]
    counted = {
        "discriminator, one batch": ["6.3e19", *(discriminator for _, discriminator in ways)],
        "both networks, one batch": ["9.5e19", *(sum(way) for way in ways)],
        "both networks, both batches": ["", *(2 * sum(way) for way in ways)],
    }
    rows = []
    for name, (paper, *costs) in counted.items():
        rows.append([name, paper, *(f"{config.batch_tokens * config.steps * cost:.2e}" for cost in costs)])
    table = runs.markdown_table(["base", "paper", *WAYS], rows)
    return f"""XLM-E table 4: training FLOPs of 125,000 steps of batches of 2,048 x 512 tokens\n\n{table}

The paper's numbers follow exactly from neither way of counting. 6.3e19 (- TRTD) and 9.5e19 (XLM-E) are close to what
ELECTRA's script gives, with its vocabulary of 30,522, for the discriminator alone and for both networks on one batch;
by the text both rows train both networks, on one batch a step without TRTD and on two with it."""


def on_paper(preset: str) -> tuple[Config, Electra]:
    """A preset's model, of shapes without numbers, with XLM-R's vocabulary where the preset names none."""
    config = Config(**{"vocab_size": 250_002} | PRESETS[preset])
    with torch.device("meta"):
        return config, make(config)


# ---------------------------------------------------------------------------------------------------------------------
# One run


def open_data(config: Config, context) -> dict[str, MaskedData | PairData]:
    """Both corpora; catalogs are prepared here where they are missing. ValueError where their vocabularies differ."""
    folders = [ready(name, config.spm, make=context.rank == 0) for name in (config.data, config.pairs)]
    context.barrier()
    micros = config.batch_tokens // config.micro_tokens
    shape = config.block_size, config.micro_tokens, micros, config.seed, config.sampling_exponent, config.mask_share
    data = {}
    for kind, reader, folder in zip(KINDS, (MaskedData, PairData), folders):
        data[kind] = reader(folder, *shape, replace=(1.0, 0.0), span=config.span)
        if context.rank == 0:
            data[kind].verify()
    if data["sentences"].tokenizer.sha256 != data["pairs"].tokenizer.sha256:
        raise ValueError(f"{folders[0]} and {folders[1]} have different tokenizers: prepare both with the same --spm")
    return data


def train(config: Config, context) -> dict:
    """Trains (or goes on training) one model -> its result, which is also in result.json."""
    with common.clear_errors():
        data = open_data(config, context)
        run = runs.Run(config, PRESETS, context, *data.values())
        if run.result:
            return run.result
        common.seed_all(config.seed)
        # Placed first, so that float64 loads as float64.
        model = common.place(make(runs.with_vocabulary(config, data["pairs"])), context)
        if run.checkpoint:
            model.load_state_dict(run.checkpoint["model"])
    parameters = measures.count_parameters(model) | {"kept": kept_parameters(model)}
    flops, kinds = step_flops(model, config), config.detects
    run.say(
        f"{run.name}: {parameters['total']:,} parameters, {parameters['kept']:,} of them to keep; "
        f"{flops / 1e9:.1f} GFLOPs a step; {len(data['sentences'].languages)} languages, "
        f"{len(data['pairs'].languages)} pairs of them"
    )
    optimizer = common.adamw(model, config)
    forward = run.begin("encoder", model, optimizer, flops / 3 / (config.batch_tokens * len(kinds)))
    seen = {kind: Counter() for kind in kinds}  # since the last evaluation
    for step in run.steps():
        common.set_learning_rate(optimizer, common.linear(step, config.steps, config.warmup, config.learning_rate))
        for micro in run.micros(step):
            sentences = data["sentences"].batch("train", step, micro)
            mlm, mrtd, balance = losses(forward, sentences, kinds["sentences"], context, seen["sentences"])
            tlm, trtd, more = 0.0, 0.0, 0.0
            if config.tlm:
                pairs = data["pairs"].batch("train", step, micro)
                tlm, trtd, more = losses(forward, pairs, kinds["pairs"], context, seen["pairs"])
            balance = config.balance_coef * (balance + more)
            loss = mlm + tlm + config.lambda_disc * (mrtd + trtd) + balance  # section 3.2
            run.backward(loss, shown=loss, tokens=config.micro_tokens * len(kinds))
        run.scaler.unscale_(optimizer)
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        run.scaler.step(optimizer)
        run.scaler.update()
        optimizer.zero_grad()
        model.after_step()
        if run.end_step(step):
            trained = {kind: scores_of(sums, context) for kind, sums in seen.items()}
            scores = evaluate(model, data, config, context)
            record = {"flops": (step + 1) * flops, "seen": trained, "held_out": scores}
            run.save(step, record, scores["loss"], f"{record['flops']:.2e} FLOPs\n{describe(scores, trained)}")
            seen = {kind: Counter() for kind in kinds}
    scores = evaluate(model, data, config, context, config.eval_maskings)
    result = {"held_out": scores, "parameters": parameters, "flops": {PRODUCTS: config.steps * flops}}
    return run.finish(result)


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    flops = result["flops"][PRODUCTS]
    return f"\n{result['name']}, {flops:.2e} FLOPs, {config.eval_maskings} maskings\n{describe(result['held_out'], {})}"


# ---------------------------------------------------------------------------------------------------------------------
# Figure 1


def figure1(config: Config, context):
    """Held-out accuracy against training FLOPs at our scale, from the logs of both objectives."""
    with common.clear_errors():
        runs.refuse_rows(config, PRESETS, [change for _, change, _ in TABLE2])
        figure = new_figure()
        configs = runs.seeds_of(config, {"objective": "rtd"}) + runs.seeds_of(config, {"objective": "mlm"})
    found, right = figure.subplots(1, 2)
    for one in configs:
        name = train(one, context)["name"]
        records = [json.loads(line) for line in Path(one.out_dir, name, "metrics.jsonl").read_text().splitlines()]
        flops = [record["flops"] for record in records]
        scores = [record["held_out"] for record in records]
        model, color = {"rtd": ("XLM-E", "tab:red"), "mlm": ("XLM", "tab:blue")}[one.objective]
        label = f"{model}, seed {one.seed}"
        found.plot(flops, [s["retrieval"][middle(s)] for s in scores], color=color, label=label)
        right.plot(flops, [s["sentences"]["generator"] for s in scores], color=color, label=label)
        if one.objective == "rtd":
            right.plot(flops, [s["sentences"]["f1"] for s in scores], ":", color=color, label=f"{label}: F1")
    found.axhline(scores[0]["chance"], color="gray", linestyle="--", label="chance")
    found.set(xlabel="training FLOPs (products)", title="Held-out translations found")
    right.set(xlabel="training FLOPs (products)", title="Masked tokens of held-out sentences right")
    found.legend()
    right.legend()
    if context.rank == 0:
        file = Path(config.out_dir, "figure1.png")
        figure.savefig(file, dpi=120)
        print(f"drawn in {file}")


def new_figure():
    """ImportError, in one line, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--figure needs one more library: pip install matplotlib") from None
    return Figure(figsize=(10, 4), layout="tight")


def main():
    config, context = runs.start(Config, PRESETS)
    if config.figure:
        figure1(config, context)
    elif not config.flops:
        runs.carry_out(config, PRESETS, context, TABLES, train, report, cells)
    elif context.rank == 0:
        print(f"{table3()}\n\n{table4()}")


if __name__ == "__main__":
    main()
