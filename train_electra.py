"""XLM-E: cross-lingual pre-training as replaced token detection, with ELECTRA's generator and discriminator.

    python train_electra.py                                          the demo: English and three ciphers of it
    python train_electra.py --objective mlm --relative_bias false    the baseline XLM: a masked LM on the same batches
    python train_electra.py --tlm false                              an ablation: sentences alone, no pairs
    python train_electra.py --router hypersphere                     X-MoE's sparse layers in the discriminator
    python train_electra.py --table 2                                every row of the ablation
    torchrun --nproc_per_node 8 train_electra.py --preset base       the paper's model and schedule, on 8 GPUs

In a batch of sentences and one of translation pairs some tokens are masked; the generator fills them in (MLM, TLM), and
the discriminator says of every token of the outcome whether it was replaced (MRTD, TRTD). Prints, at every evaluation,
how well both do that on held-out text, beside a guess that looks at nothing, and how many held-out sentences have their
translation as the nearest one. A run is kept in out/train_electra/NAME; the same command goes on where it stopped.
Whoever loads a run gets its discriminator without the head. `--help` lists every constant.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis import bilingual, flops, measures
from data import counting
from data.batches import Masked, MaskedData, PairData
from engine import parallel
from engine.device import clear_errors, seed_all
from engine.optim import adamw, clip_gradients, cross_entropy, linear, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from model import Encoder, MaskedLM, SparseModel

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, captions, or the paper's base, large and xl
    table: int | None = None  # run every row of XLM-E's table 2 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "ciphers"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    pairs: str = "ciphers-pairs"  # translation pairs under data/prepared, or the folder of prepared ones
    sampling_exponent: float = 0.7  # alpha of eq. 9: a language is drawn in proportion to its size to this power
    seed: int = 0  # of weights, data order, masks, replaced tokens and dropout
    # what is learned
    objective: Literal["rtd", "mlm"] = "rtd"  # rtd: XLM-E; mlm: a masked LM of n_layer layers, and no discriminator
    tlm: bool = True  # both on translation pairs too: TLM and TRTD; false: on sentences alone
    lambda_disc: float = 1.0  # lambda, the weight of the discriminator's losses; 50 holds a young generator back
    mask_share: float = 0.4  # of the tokens is masked; the paper's 0.15 teaches less in so short a run
    masks: Literal["all", "bert", "electra"] = "all"  # which of them show the mask in training, see MASKS
    span: float | None = None  # mean length of masked spans; None: single tokens (section 3.1 says spans do worse)
    # the model
    generator_layers: int = 4  # layers of the generator, which is as wide; with 2 the demo is not multilingual in time
    n_layer: int = 4  # layers of the discriminator, without the sparse ones
    n_head: int = 4  # H
    n_embd: int = 64  # D
    ffn_size: int = 256  # inner width of an FFN
    block_size: int = 32  # T, the longest row; in longer ones the demo becomes multilingual later
    dropout: float = 0.0  # after embeddings, attention weights, attention and FFN; the sparse layers have none
    init_std: float = 0.05  # of the normal that weights start from; from 0.02 a narrow discriminator learns later
    frequency_bias: bool = True  # the generator's output bias starts at the log frequencies of the training tokens
    relative_bias: bool = True  # gated relative position bias in both networks (section 3.3); the baseline has none
    # experts of the discriminator, or of the masked LM
    router: str = "dense"  # dense, or a name in routers.ROUTERS; hypersphere is X-MoE's
    score: Literal["dot", "hypersphere"] | None = None  # how well a token fits an expert; None: the router's
    gate: Literal["softmax", "sigmoid"] | None = None  # the weight of a chosen expert; None: the router's
    moe_after: tuple[int, ...] = (2,)  # a sparse layer stands after each of these layers, counted from 1
    experts: int = 32  # E
    expert_size: int = 128  # F, the inner width of an expert's FFNs
    expert_layers: int = 3  # FFNs of an expert, each with a norm and a residual around it; 0: one FFN without them
    top_k: int = 1  # K, experts per token
    capacity_factor: float = float("inf")  # gamma: an expert serves gamma * S / E of S tokens at most; inf: no limit
    threshold: float = 0.9  # t of XMoE's router, the probability that the chosen experts must reach together
    eval_threshold: float | None = None  # t at test; None: the same
    routing_dim: int | None = None  # d_e, what the router projects to; 0: nothing; None: on a hypersphere E / 2
    init_temperature: float | None = None  # tau_0 of a hypersphere; None: the gate's
    router_std: float = 0.02  # of the normal that the router's projection starts from
    balance_coef: float = 0.01  # the weight of the balance loss
    # training
    steps: int = 4000  # optimizer steps
    batch_tokens: int = 512  # tokens of a step, over all processes, for sentences and again for pairs
    micro_tokens: int = 512  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1.5e-3  # peak
    distance_lr: float = 3.0  # the relative bias learns at so many times the rate: else it hardly grows in this time
    warmup: float = 0.1  # share of the steps; then a line down to 0
    beta2: float = 0.999  # Adam; in small batches a token is rare: its gradient must be remembered
    eps: float = 1e-9  # Adam; the gradients of rare tokens are small
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit
    eval_every: int = 250  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 14  # validation tokens of sentences, and of pairs, at most (retrieval has its own limit)
    eval_maskings: int = 10  # the final scores are means over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    # where and how
    out_dir: str = "out/train_electra"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # torch.compile; None: where products are in bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: less memory, for a second forward pass
    resume: bool = True  # go on from the run's newest checkpoint; false: start again

    def unread(self) -> set[str]:
        """Constants that a run does not read because of others: see engine/config.py."""
        return {"lambda_disc", "generator_layers"} if self.objective == "mlm" else set()


# Real sentences and their translations, few and short: captions of pictures in English and German (Multi30k). How to
# prepare them stands in data/README.md.
CAPTIONS = dict(data="captions", pairs="captions-pairs", n_embd=128, ffn_size=512, block_size=64)
CAPTIONS |= dict(steps=14_000, eval_every=2000)  # at half the rate more translations are found
CAPTIONS |= dict(init_std=0.02, distance_lr=10.0, dtype="auto")

# XLM-E appendices A and B; micro-batches are ours. Of Large and XL the text says that they have a vocabulary of 500K,
# but only one of 2^19 gives the parameters of table 3.
BASE = dict(data="cc100", pairs="opus100", mask_share=0.15, masks="electra")
BASE |= dict(n_layer=12, n_head=12, n_embd=768, init_std=0.02)
BASE |= dict(ffn_size=3072, block_size=512, dropout=0.1)
BASE |= dict(moe_after=(6,), frequency_bias=False)
BASE |= dict(lambda_disc=50.0, learning_rate=5e-4, distance_lr=1.0)
BASE |= dict(warmup=0.08, beta2=0.98, eps=1e-6)
BASE |= dict(steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512)
BASE |= dict(eval_every=5000, eval_tokens=1 << 25, dtype="auto")
LARGE = dict(generator_layers=6, n_layer=24, n_head=16, n_embd=1024, ffn_size=4096, moe_after=(12,), recompute=True)
XL = dict(generator_layers=8, n_layer=48, n_head=24, n_embd=1536, ffn_size=6144, moe_after=(24,), recompute=True)
PRESETS = {
    "demo": {},
    "captions": CAPTIONS,
    "base": BASE,
    "large": BASE | LARGE,
    "xl": BASE | XL,
}

# Steps of XLM that take the FLOPs of one step of XLM-E, by preset.
XLM_STEPS = {"demo": 1.953, "captions": 1.813, "base": 1.26, "large": 1.203, "xl": 1.155}
# What is shown in place of a masked token: the mask with the first probability, any token with the second, else itself.
MASKS = {"all": (1.0, 0.0), "bert": (0.8, 0.1), "electra": (0.85, 0.0)}
XLM = dict(objective="mlm", relative_bias=False, masks="bert")
SENTENCES = dict(tlm=False, masks="electra")  # without pairs a demo that always shows the mask learns nothing


def table2(base: Config) -> Table:
    """Without TRTD, without the gated bias, and XLM. The paper's numbers are XNLI, MLQA (F1 / EM) after fine-tuning.

    XLM, and XLM-E without pairs, stand here with XLM-E's steps and once more with its FLOPs.
    """
    more = XLM_STEPS[base.preset]
    longer = dict(steps=round(more * base.steps))
    rows = [
        (("XLM", "?, 66.2 / 47.8"), XLM),
        ((f"XLM, {more:.2f} x the steps", ""), XLM | longer),
        ((f"XLM with the bias, {more:.2f} x the steps", ""), XLM | dict(relative_bias=True) | longer),
        (("XLM - TLM", "?, 64.0 / 46.0"), XLM | dict(tlm=False)),
        (("XLM-E", "76.6, 68.3 / 49.8"), {}),
        (("XLM-E - bias", ""), dict(relative_bias=False)),
        (("XLM-E, masks as ELECTRA's", ""), dict(masks="electra")),
        (("XLM-E - TRTD, masks as ELECTRA's", "75.1, 67.8 / 49.7"), SENTENCES),
        (("XLM-E - TRTD, 2 x the steps", ""), SENTENCES | dict(steps=2 * base.steps)),
        (("XLM-E - TRTD - bias", "?, 67.4 / 49.2"), SENTENCES | dict(relative_bias=False)),
    ]
    return Table("XLM-E table 2, pre-training: held-out text", ("model", "paper: XNLI, MLQA"), rows)


TABLES = {2: table2}


def cells(result: dict) -> dict:
    """A row of the table."""
    scores = result["held_out"]
    sentences, pairs, translation = scores["sentences"], scores["pairs"], scores["translation"]
    layer = measures.middle_layer(len(scores["retrieval"]) - 1)
    return {
        "params, M": (result["parameters"]["kept"] / 1e6, ".1f"),
        "FLOPs": (result["flops"], ".2e"),
        "masked tokens right": (sentences["generator"], ".1%"),
        "in pairs": (pairs["generator"], ".1%"),
        "loss saved": (sentences.get("saved"), ".1%"),
        "saved in pairs": (pairs.get("saved"), ".1%"),
        "beside a translation": (translation["with"], ".1%"),
        "translation adds": (translation["with"] - translation["without"], "+.2%"),
        "change at step": (result.get("change"), ",.0f"),
        "translations found": (scores["retrieval"][layer], ".1%"),
        "found, centred": (scores["centred"][layer], ".1%"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The two networks, and their losses


class Electra(SparseModel):
    """A discriminator and a generator (sections 2 and 3), which share the embeddings of tokens and, as in ELECTRA, of
    positions: of distances, too, so that the discriminator knows where neighbours stand as soon as the generator does.
    """

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
        self.generator.encoder.distance = self.encoder.distance

    def forward(self, ids, masked, real, targets):
        """-> the generator's logits (M, V), the balance loss, and of S tokens verdicts and whether they were replaced.

        ids (B, T) after masking; masked (M,) places in B * T; real (S,) as in `Encoder`; targets (M,) what stood there.
        A verdict is a logit, above 0 where a token seems replaced.
        """
        logits, _ = self.generator(ids, masked, real)
        drawn = sample(logits)  # (M,)
        corrupt = ids.flatten().index_copy(0, masked, drawn)  # (B * T,), eqs. 2 and 4
        h, balance = self.encoder(corrupt.view_as(ids), real)  # (B, T, D)
        verdicts = self.out(self.ln_h(F.gelu(self.dense(h)))).flatten()  # (B * T,)
        wrong = drawn != targets  # a token that was drawn as it stood there counts as original
        replaced = corrupt.new_zeros(len(corrupt), dtype=torch.bool)  # (B * T,)
        replaced[masked] = wrong
        if real is not None:
            verdicts, replaced = verdicts[real], replaced[real]  # (S,)
        return logits, balance, verdicts, replaced


NETWORKS = {"rtd": Electra, "mlm": MaskedLM}  # by what is learned


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """(M,) tokens from softmax(logits), (M, V), without gradient: each is the largest of V logits with Gumbel noise.

    torch.multinomial is slower, and meets a NaN with an assertion on the device.
    """
    logits = logits.float()
    noise = torch.rand_like(logits).log_().neg_().log_()  # in place: each is as large as the logits
    return (logits - noise).argmax(dim=1)


def losses_of(forward, batch: Masked, config: Config, context):
    """-> the three losses of a batch, and what the networks say of it: logits, and the verdicts with their truth.

    The losses are MLM or TLM, the mean over masked tokens; MRTD or TRTD, the mean over all tokens, 0 for the baseline;
    and the balance loss.
    """
    ids, masked, targets, real = context.send_all(*batch[:4])
    inputs = [ids, masked, real]
    if config.objective == "rtd":
        inputs.append(targets)
    with context.autocast():
        logits, balance, *judged = forward(*inputs)
    total = cross_entropy(logits, targets, reduction="sum")
    mlm, rtd = total / max(1, len(targets)), 0.0  # eq. 1
    if judged:
        verdicts, replaced = (x.to(mlm.dtype) for x in judged)
        rtd = F.binary_cross_entropy_with_logits(verdicts, replaced)  # eqs. 3, 5
    return (mlm, rtd, balance), [logits, *judged]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def score(model, batches, special, config: Config, context) -> dict:
    """Mean losses and shares of right answers, over all batches of all processes; each batch's draws are fixed.

    saved: by how much the discriminator's loss is below that of a blind guess. Such a guess knows that `special` ids
    are never masked, and which share of the other tokens is replaced; 0 means that nothing more has been learned.
    """
    special = torch.tensor([*special])
    own, sums = Counter(), Counter()  # this process's counts, and those of all
    for masking, first, batch in batches:
        seed_all(config.seed, masking, first, 3)  # no key of training's, whose fourth number is as good as 0
        (mlm, rtd, balance), (logits, *judged) = losses_of(model, batch, config, context)
        right = logits.argmax(dim=1).cpu() == batch.targets  # (M,)
        shown = batch.ids.flatten()
        if batch.real is not None:
            shown = shown[batch.real]  # (S,)
        M, S = len(right), len(shown)
        own.update(masked=M, mlm=M * float(mlm), generator=int(right.sum()))
        own.update(tokens=S, rtd=S * float(rtd), balance=M * float(balance))
        # What is special is never masked. A masked place shows the mask, which is special, and hides what is not.
        own["maskable"] += S - int(torch.isin(shown, special).sum()) + M
        if judged:
            verdicts, replaced = judged  # (S,)
            correct = (verdicts > 0) == replaced
            own.update(accuracy=int(correct.sum()), replaced=int(replaced.sum()))
    for part in context.gather(own):
        sums.update(part)  # adding Counters would lose what is not a number
    M, S, maskable = sums["masked"], sums["tokens"], sums["maskable"]
    scores = {"masked": M, "tokens": S}
    scores |= {name: sums[name] / max(1, M) for name in ("mlm", "generator", "balance")}
    if config.objective == "rtd":
        scores |= {name: sums[name] / S for name in ("rtd", "accuracy", "replaced")}
        share = sums["replaced"] / max(1, maskable)
        entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p)
        blind = maskable / S * entropy  # a special token, which nobody replaces, costs the guess nothing
        scores["saved"] = 1 - scores["rtd"] / blind if blind else 0.0
    return scores


def evaluate(model, data: dict, config: Config, context, untrained: list[float], maskings: int) -> dict:
    """Scores of both kinds of validation text, routing statistics of the sparse layers, and two measures of pairs.

    untrained: the translations that each layer found before training about each language's mean; they are kept, too.
    """
    model.eval()
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    scores = {"loss": 0.0}
    for kind, corpus in data.items():
        batches = corpus.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world)
        scores[kind] = own = score(model, batches, corpus.tokenizer.special, config, context)
        scores["loss"] += own["mlm"] + config.lambda_disc * own.get("rtd", 0.0)
    scores["layers"] = [watch.finish(context.sum) for watch in watches]
    generator, how = getattr(model, "generator", model), (data["pairs"], config, context)
    scores["translation"] = bilingual.translation_effect(generator, *how, maskings)
    scores |= bilingual.retrieval(model.encoder, *how) | {"untrained": untrained}
    model.train()
    return scores


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Trains (or goes on training) one model -> its result, which is also in result.json."""
    with clear_errors():
        data = open_data(config, context)
        # What is held out always shows the mask, so that scores are equal for all masks of training. Without a limit
        # they do not depend on the size of a batch, and larger ones take less time.
        limited = math.isfinite(config.capacity_factor)
        times = 1 if limited else max(1, 4096 // config.micro_tokens)
        larger = replace(config, masks="all", micro_tokens=times * config.micro_tokens)
        held_out = open_data(larger, context)
        run = Run(config, PRESETS, context, *data.values())
        if run.result:
            return run.result
        model = build(config, data, context)
        if not run.kept:
            found = bilingual.retrieval(model.eval().encoder, held_out["pairs"], config, context)
            run.kept["untrained"] = found["centred"]
            model.train()
        work = step_flops(model)
        parameters = flops.count_parameters(model)
        kept = [p.numel() for name, p in model.named_parameters() if not name.startswith("generator.")]
        parameters["kept"] = sum(kept)  # the generator is thrown away when it has done its work
        size = "{total:,} parameters, {kept:,} of them to keep".format(**parameters)
        context.say(f"{run.name}: {size}; {work / 1e9:.1f} GFLOPs a step")
        counted = counting.masked_scores(held_out["sentences"], config.eval_tokens)
        context.say(counting.in_words(counted))
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        corpora = [*data.values()] if config.tlm else [data["sentences"]]
        of_token = work / 3 / (len(corpora) * config.batch_tokens)
        run.resume(model, optimizer, of_token, "sum of the losses {:.4f}".format)

    for step in run.steps():
        set_learning_rate(optimizer, linear(step, config.steps, config.warmup, config.learning_rate))
        of_step = []  # of sentences, and of pairs: batches, and what to divide their losses by
        for corpus in corpora:
            batches = [corpus.batch("train", step, micro) for micro in run.micros]
            parts = run.parts([(len(batch.targets), batch.tokens) for batch in batches])
            of_step.append(zip(batches, parts))
        for micro, *of_micro in zip(run.micros, *of_step):
            seed_all(config.seed, 1 + step, micro)  # all that is random: so a resumed run is the same run
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP exchanges gradients once
            asked = []
            for batch, (masked, tokens) in of_micro:
                (mlm, rtd, balance), _ = losses_of(forward, batch, config, context)
                asked.append((mlm / masked, rtd / tokens, balance / tokens))
            mlm, rtd, balance = map(sum, zip(*asked))
            loss = mlm + config.lambda_disc * rtd + config.balance_coef * balance  # section 3.2
            loss.backward()
            run.add(loss, tokens=len(corpora) * config.micro_tokens)
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()  # restores what a router keeps fixed: a hypersphere its norms, the others nothing
        if run.due(step + 1):
            maskings = config.eval_maskings if step + 1 == config.steps else 1
            scores = evaluate(model, held_out, config, context, run.kept["untrained"], maskings)
            run.kept["scores"] = scores
            translation = scores["translation"]
            if translation["with"] > translation["without"] + 0.02:  # it begins to help: the languages become one
                run.kept.setdefault("change", step + 1)
            record = {"flops": (step + 1) * work, "held_out": scores}
            run.save(step + 1, record, f"{record['flops']:.2e} FLOPs\n{describe(scores)}", scores["loss"])

    result = {"held_out": run.kept["scores"], "change": run.kept.get("change"), "counting": counted}
    return run.finish(result | {"parameters": parameters, "flops": config.steps * work})


def open_data(config: Config, context) -> dict[str, MaskedData | PairData]:
    """Both corpora. Raises ValueError where their vocabularies differ."""
    options = {"exponent": config.sampling_exponent, "mask_share": config.mask_share, "span": config.span}
    options["replace"] = MASKS[config.masks]
    sentences = MaskedData.open(config.data, config, context, **options)
    pairs = PairData.open(config.pairs, config, context, **options)
    if sentences.tokenizer.sha256 != pairs.tokenizer.sha256:
        what = "have different tokenizers: prepare both with the same --tokenizer"
        raise ValueError(f"{config.data} and {config.pairs} {what}")
    return {"sentences": sentences, "pairs": pairs}


def build(config: Config, data: dict, context) -> Electra | MaskedLM:
    """The model drawn from the seed."""
    seed_all(config.seed)
    model = context.place(NETWORKS[config.objective](config, data["pairs"].vocab_size))
    if config.frequency_bias:
        generator = getattr(model, "generator", model)
        generator.bias.data.copy_(data["sentences"].log_frequencies())
    return model


def step_flops(model: Electra | MaskedLM) -> float:
    """Training FLOPs of a step, forward and twice that backward; pairs count as rows of block_size tokens, too."""
    config, D = model.config, model.config.n_embd
    generator = getattr(model, "generator", model)
    head = config.mask_share * flops.masked_head_flops(generator)  # only masked tokens pass through it
    forward = flops.flops_per_token(generator.encoder, generator.config, head)
    if config.objective == "rtd":
        head = 2 * D * D + 2 * D
        forward += flops.flops_per_token(model.encoder, config, head)
    batches = 1 + config.tlm  # of sentences, and of pairs
    return 3 * batches * config.batch_tokens * forward


def describe(scores: dict) -> str:
    """What one evaluation found: a line for each kind of text, two of both languages together, one a sparse layer."""
    lines = []
    for kind in ("sentences", "pairs"):
        own = scores[kind]
        line = f"{measures.in_perplexity(own['mlm'])}, {own['generator']:.1%} right"
        if "rtd" in own:
            saved = f"{abs(own['saved']):.1%} {'above' if own['saved'] < 0 else 'below'} a blind guess's"
            line = f"generator: {line}; discriminator: loss {own['rtd']:.4f}, {saved}, "
            line += "{accuracy:.1%} right, {replaced:.1%} replaced".format(**own)
        lines.append(f"held-out {kind}: {line}")
    line = "masked tokens of half a pair: {with:.2%} right with its translation beside it, {without:.2%} without: "
    low, high = scores["translation"]["effect"]
    lines.append(f"{line.format(**scores['translation'])}a difference of {low:+.2%} to {high:+.2%}")
    layer = measures.middle_layer(len(scores["retrieval"]) - 1)
    found, centred, before = (scores[name][layer] for name in ("retrieval", "centred", "untrained"))
    line = f"held-out translations found by layer {layer}: {found:.1%} ({scores['chance']:.1%} by chance), "
    lines.append(f"{line}{centred:.1%} where the mean of each language is taken away ({before:.1%} untrained)")
    for i, moe in enumerate(scores["layers"], 1):
        lines.append(f"sparse layer {i}: {measures.describe_routing(moe)}")
    return "\n".join(lines)


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    title = f"{result['name']}, {result['flops']:.2e} FLOPs, {config.eval_maskings} maskings"
    lines = ["", title, describe(result["held_out"]), counting.in_words(result["counting"])]
    began, translation = result["change"], result["held_out"]["translation"]
    words = f"a translation helps since step {began}" if began else "a translation does not help yet: give more --steps"
    added = translation["with"] - translation["without"]
    lines.append(f"{words}; in the end {added:+.1%} of the masked tokens are right because it is there")
    return "\n".join(lines)


def main():
    config, context = start(Config, PRESETS)
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
