"""XLM-E: cross-lingual pre-training as replaced token detection, with ELECTRA's generator and discriminator.

    python train_electra.py                                          the demo: English and three ciphers of it
    python train_electra.py --objective mlm --relative_bias false    the baseline XLM: a masked LM on the same batches
    python train_electra.py --tlm false                              an ablation: sentences only, no pairs
    python train_electra.py --router hypersphere                     X-MoE's sparse layers in the discriminator
    python train_electra.py --table 2                                every row of the ablation
    torchrun --nproc_per_node 8 train_electra.py --preset base       the paper's model and schedule, on 8 GPUs

Some tokens are masked in a batch of sentences and one of translation pairs; the generator fills them in (MLM, TLM), and
the discriminator predicts for every token of the result whether it was replaced (MRTD, TRTD). Each evaluation prints
the held-out scores of both, next to a blind guess, and how many held-out sentences have their translation as nearest
neighbour. A run lives in out/train_electra/NAME; the same command resumes it. Loading a run gives its discriminator
without the head. `--help` lists all constants.
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

from data.batches import Masked, MaskedData, PairData
from data.files import progress
from engine import parallel
from engine.device import clear_errors, seed_all
from engine.optim import adamw, clip_gradients, linear, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from metrics import bilingual, counting, crosslingual, flops, in_perplexity
from metrics.routing import RoutingStats, describe_routing
from model import Encoder, MaskedLM, SparseModel, cross_entropy

# ---------------------------------------------------------------------------------------------------------------------
# Constants: edit one here, or pass --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, captions, or the paper's base, large and xl
    table: int | None = None  # run every row of XLM-E's table 2 at the preset's scale
    seeds: int = 1  # train this many seeds and report mean and standard deviation
    data: str = "ciphers"  # a multilingual corpus under data/prepared, or the folder of a prepared one
    pairs: str = "ciphers-pairs"  # translation pairs under data/prepared, or the folder of a prepared corpus
    sampling_exponent: float = 0.7  # a language is sampled in proportion to its size to this power
    seed: int = 0  # seed of weights, data order, masks, sampled tokens and dropout
    # what is learned
    objective: Literal["rtd", "mlm"] = "rtd"  # rtd: XLM-E; mlm: a masked LM of n_layer layers without a discriminator
    tlm: bool = True  # train on translation pairs too (TLM and TRTD); false: on sentences only
    lambda_disc: float = 1.0  # weight of the discriminator's losses (lambda); 50 as in the paper slows the generator
    mask_share: float = 0.4  # share of tokens to mask; with the paper's 0.15 the demo learns less
    masks: Literal["all", "bert", "electra"] = "all"  # what replaces masked tokens in training: see MASKS
    # the model
    generator_layers: int = 4  # generator layers, of the same width; with 2 the demo aligns its languages too late
    n_layer: int = 4  # discriminator layers, not counting sparse ones
    n_head: int = 4  # number of attention heads (H)
    n_embd: int = 64  # width of the model (D)
    ffn_size: int = 256  # inner width of an FFN
    block_size: int = 32  # longest row in tokens (T); with longer rows the demo aligns its languages later
    dropout: float = 0.0  # dropout of embeddings, attention weights, attention and FFN; none in sparse layers
    init_std: float = 0.05  # standard deviation of initial weights; at 0.02 a narrow discriminator learns later
    frequency_bias: bool = True  # initialize the generator's output bias to the log frequencies of the training tokens
    relative_bias: bool = True  # gated relative position bias in both networks (section 3.3); the baseline has none
    # experts of the discriminator, or of the masked LM
    router: str = "dense"  # dense, a name in routers.ROUTERS, or FILE.py:NAME; hypersphere is X-MoE's
    score: Literal["dot", "hypersphere"] | None = None  # token-expert similarity; None: the router's default
    gate: Literal["softmax", "sigmoid"] | None = None  # weight of a chosen expert; None: the router's default
    moe_after: tuple[int, ...] = (2,)  # insert a sparse layer after each of these layers, counted from 1
    experts: int = 32  # number of experts per sparse layer (E)
    expert_size: int = 128  # inner width of an expert's FFNs (F)
    expert_layers: int = 3  # pre-norm residual FFNs per expert; 0: one plain FFN
    top_k: int = 1  # experts that a token may choose (K)
    capacity_factor: float = float("inf")  # gamma: an expert serves at most gamma * S / E of S tokens; inf: no limit
    threshold: float = 0.9  # for XMoE's router: the chosen experts' probabilities must sum to this t
    eval_threshold: float | None = None  # threshold at test; None: the same
    routing_dim: int | None = None  # dimension that routers project to (d_e); 0: none; None: E / 2 on a hypersphere
    init_temperature: float | None = None  # initial temperature tau_0 on a hypersphere; None: the paper's for the gate
    router_std: float = 0.02  # standard deviation of the router's initial projection
    balance_coef: float = 0.01  # weight of the balance loss (alpha)
    # training
    steps: int = 4000  # optimizer steps
    batch_tokens: int = 512  # tokens of sentences per step, over all processes, and as many tokens of pairs
    micro_tokens: int = 512  # tokens per forward pass; changes results under a capacity limit
    learning_rate: float = 1.5e-3  # learning rate at the end of the warm-up, its peak
    rel_bias_lr: float = 3.0  # learning rate multiplier of the relative position bias; at 1 it hardly grows in time
    warmup: float = 0.1  # share of steps for linear warm-up; then linear decay to 0
    beta2: float = 0.999  # Adam's beta2 (decay of squared gradients); high, since tokens are rare in small batches
    eps: float = 1e-9  # Adam's epsilon; low, since rare tokens have small gradients
    weight_decay: float = 0.01  # weight decay of matrices and embeddings
    grad_clip: float = 2.0  # clip the gradient to this norm; 0: no clipping
    eval_every: int = 250  # evaluate and save a checkpoint every N steps
    eval_tokens: int = 1 << 14  # at most this many validation tokens of each corpus; retrieval has a separate limit
    eval_maskings: int = 10  # fixed maskings that the last evaluation averages over; the others use one
    log_every: int = 10  # report the training loss every N steps
    # where and how
    out_dir: str = "out/train_electra"  # folder of all runs
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; None: for bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: saves memory at the cost of a second forward pass
    resume: bool = True  # resume from the newest checkpoint; false: start over

    def unread(self) -> set[str]:
        """Constants that this run ignores, given its others: see engine/config.py."""
        return {"lambda_disc", "generator_layers"} if self.objective == "mlm" else set()


# A small corpus of short, real sentences and their translations: image captions in English and German (Multi30k); see
# data/README.md.
CAPTIONS = dict(data="captions", pairs="captions-pairs", n_embd=128, ffn_size=512, block_size=64)
CAPTIONS |= dict(steps=14_000, eval_every=2000)  # --learning_rate 7.5e-4 retrieves more translations
CAPTIONS |= dict(init_std=0.02, rel_bias_lr=10.0, dtype="auto")

# XLM-E appendices A and B; micro-batches are ours. The paper's text says that Large and XL have a vocabulary of 500K,
# but only 2^19 gives the parameters of table 3.
BASE = dict(data="cc100", pairs="opus100", mask_share=0.15, masks="electra")
BASE |= dict(n_layer=12, n_head=12, n_embd=768, init_std=0.02)
BASE |= dict(ffn_size=3072, block_size=512, dropout=0.1)
BASE |= dict(moe_after=(6,), frequency_bias=False)
BASE |= dict(lambda_disc=50.0, learning_rate=5e-4, rel_bias_lr=1.0)
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
# A masked token becomes the mask with the first probability, a random token with the second, else stays the same.
MASKS = {"all": (1.0, 0.0), "bert": (0.8, 0.1), "electra": (0.85, 0.0)}
XLM = dict(objective="mlm", relative_bias=False, masks="bert")
SENTENCES = dict(tlm=False, masks="electra")  # without pairs, the demo learns nothing with masks="all"


def table2(base: Config) -> Table:
    """XLM, and XLM-E without TRTD or the gated bias; XLM and XLM-E without pairs at equal steps and at equal FLOPs.

    The paper's numbers are XNLI and MLQA (F1 / EM) after fine-tuning.
    """
    ratio = XLM_STEPS[base.preset]
    longer = dict(steps=round(ratio * base.steps))
    rows = [
        (("XLM", "?, 66.2 / 47.8"), XLM),
        ((f"XLM, {ratio:.2f} x the steps", ""), XLM | longer),
        ((f"XLM with the bias, {ratio:.2f} x the steps", ""), XLM | dict(relative_bias=True) | longer),
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
    layer = crosslingual.middle_layer(len(scores["retrieval"]) - 1)
    return {
        "params, M": (result["parameters"]["without_generator"] / 1e6, ".1f"),
        "FLOPs": (result["flops"], ".2e"),
        "masked tokens right": (sentences["generator"], ".1%"),
        "in pairs": (pairs["generator"], ".1%"),
        "loss saved": (sentences.get("saved"), ".1%"),
        "saved in pairs": (pairs.get("saved"), ".1%"),
        "beside a translation": (translation["with"], ".1%"),
        "translation adds": (translation["with"] - translation["without"], "+.2%"),
        "translations help since step": (result.get("since_step"), ",.0f"),
        "translations found": (scores["retrieval"][layer], ".1%"),
        "found, centred": (scores["centred"][layer], ".1%"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The two networks and their losses


class Electra(SparseModel):
    """A discriminator and a generator (sections 2 and 3) that share token and, as in ELECTRA, position embeddings.

    They share the relative position bias too, so both networks learn to attend to neighbours at the same time.
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
        self.generator.encoder.rel_bias = self.encoder.rel_bias

    def forward(self, ids, masked, targets, nonpad=None):
        """-> MLM or TLM loss, a mean over masked tokens; routers' losses; MRTD or TRTD loss, a mean over all tokens.

        ids (B, T) after masking; masked (M,) flat indices, targets (M,) the tokens there; nonpad: see `Encoder`.
        """
        logits, router_loss, disc_logits, replaced = self.predict(ids, masked, targets, nonpad)
        return cross_entropy(logits, targets), router_loss, disc_loss(disc_logits, replaced)

    def predict(self, ids, masked, targets, nonpad=None):
        """-> generator logits (M, V), routers' losses, discriminator logits (S,) and labels (S,), true if replaced"""
        logits, _ = self.generator(ids, masked, nonpad=nonpad)
        drawn = sample(logits)  # (M,)
        corrupt = ids.flatten().index_copy(0, masked, drawn)  # (B * T,) eqs. 2, 4
        h, router_loss = self.encoder(corrupt.view_as(ids), nonpad)  # (B, T, D)
        disc_logits = self.out(self.ln_h(F.gelu(self.dense(h)))).flatten()  # (B * T,)
        replaced = corrupt.new_zeros(len(corrupt), dtype=torch.bool)  # (B * T,)
        replaced[masked] = drawn != targets  # a sample that equals the original counts as original
        if nonpad is not None:
            disc_logits, replaced = disc_logits[nonpad], replaced[nonpad]  # (S,)
        return logits, router_loss, disc_logits, replaced


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """logits (M, V) -> (M,) tokens sampled from softmax(logits) by the Gumbel-max trick, without gradient.

    torch.multinomial is slower, and a NaN triggers a device-side assertion in it.
    """
    logits = logits.float()
    noise = torch.rand_like(logits).log_().neg_().log_()  # in place, since it is as large as the logits
    return (logits - noise).argmax(dim=1)


def disc_loss(disc_logits: Tensor, replaced: Tensor) -> Tensor:
    """(S,), (S,) -> mean binary cross entropy (eqs. 3, 5), in fp32 even under autocast"""
    dtype = torch.promote_types(disc_logits.dtype, torch.float32)
    return F.binary_cross_entropy_with_logits(disc_logits.to(dtype), replaced.to(dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def score(model, batches, special, config: Config, context) -> dict:
    """Mean losses and accuracies over all batches of all processes, always with the same sampled tokens.

    saved: how much lower the discriminator's loss is than that of a blind guess, as a share of it. The guess knows only
    that `special` ids (with <pad>) are never masked and what share of other tokens is replaced.
    """
    special = torch.tensor([*special])
    counts, sums = Counter(), Counter()  # of this process, of all processes
    for masking, first, batch in progress(batches, "evaluating"):
        seed_all(config.seed, masking, first, 3)  # differs from all seeds of training, whose fourth number is 0
        ids, masked, targets, nonpad = context.send_all(*batch[:4])
        with context.autocast():
            if config.objective == "rtd":
                logits, _, disc_logits, replaced = model.predict(ids, masked, targets, nonpad)
            else:
                logits, _ = model(ids, masked, nonpad=nonpad)
        right = logits.argmax(dim=1).cpu() == batch.targets  # (M,)
        M, S = len(right), batch.tokens
        counts.update(masked=M, mlm=M * float(cross_entropy(logits, targets)), generator=int(right.sum()))
        # Special tokens are never masked. A masked position shows the mask, a special token, but hides another.
        counts.update(tokens=S, maskable=M + int((~torch.isin(batch.ids, special)).sum()))
        if config.objective == "rtd":
            correct = (disc_logits > 0) == replaced  # (S,)
            counts["rtd"] += S * float(disc_loss(disc_logits, replaced))
            counts.update(accuracy=int(correct.sum()), replaced=int(replaced.sum()))
    for process_counts in context.gather(counts):
        sums.update(process_counts)  # adding Counters would drop NaN
    M, S, maskable = sums["masked"], sums["tokens"], sums["maskable"]
    scores = {"masked": M, "tokens": S}
    scores |= {name: sums[name] / max(1, M) for name in ("mlm", "generator")}
    if config.objective == "rtd":
        scores |= {name: sums[name] / S for name in ("rtd", "accuracy", "replaced")}
        share = sums["replaced"] / max(1, maskable)
        entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p)
        blind = maskable / S * entropy  # the guess is certain that special tokens are not replaced
        scores["saved"] = 1 - scores["rtd"] / blind if blind else 0.0
    return scores


def evaluate(model, data: dict, config: Config, context, untrained: list[float], maskings: int) -> dict:
    """Scores on held-out sentences and pairs, routing statistics, and two measures of how well languages are aligned.

    untrained: retrieval accuracy of each layer before training, with language means removed; added to the scores.
    """
    model.eval()
    watches = [RoutingStats(moe) for moe in model.moe_layers]
    scores = {"loss": 0.0}
    for kind, corpus in data.items():
        batches = corpus.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world)
        scores[kind] = losses = score(model, batches, corpus.tokenizer.special, config, context)
        scores["loss"] += losses["mlm"] + config.lambda_disc * losses.get("rtd", 0.0)
    scores["layers"] = [watch.finish(context.gather) for watch in watches]
    generator, pairs = getattr(model, "generator", model), data["pairs"]
    scores["translation"] = bilingual.translation_effect(generator, pairs, config, context, maskings)
    scores |= bilingual.retrieval(model.encoder, pairs, config, context) | {"untrained": untrained}
    model.train()
    return scores


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Trains a model, or resumes training -> the content of result.json."""
    with clear_errors():
        data = open_data(config, context)
        # Evaluation always shows the mask, whatever --masks is. Without a capacity limit, scores do not depend on the
        # batch size, and larger batches are faster.
        factor = 1 if math.isfinite(config.capacity_factor) else max(1, 4096 // config.micro_tokens)
        held_out = open_data(replace(config, masks="all", micro_tokens=factor * config.micro_tokens), context)
        run = Run(config, PRESETS, context, *data.values())
        if run.result:
            return run.result
        model = build(config, data, context)
        work = step_flops(model)
        parameters = flops.count_parameters(model)
        sizes = [p.numel() for name, p in model.named_parameters() if not name.startswith("generator.")]
        parameters["without_generator"] = sum(sizes)  # the generator is not needed after pre-training
        size = "{total:,} parameters, {without_generator:,} without the generator".format(**parameters)
        context.say(f"{run.name}: {size}; {work / 1e9:.1f} GFLOPs per step")
        if not run.extra:
            untrained = bilingual.retrieval(model.eval().encoder, held_out["pairs"], config, context)
            run.extra["untrained"] = untrained["centred"]
            model.train()
        counted = counting.masked_scores(held_out["sentences"], config.eval_tokens)
        context.say(counting.in_words(counted))
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        corpora = [*data.values()] if config.tlm else [data["sentences"]]
        token_flops = work / 3 / (len(corpora) * config.batch_tokens)
        run.resume(model, optimizer, token_flops, "sum of the losses {:.4f}".format)

    def batches_of(step: int) -> list[list[Masked]]:
        """Of sentences and of pairs, for each micro-batch of this process."""
        return [[corpus.batch("train", step, micro) for corpus in corpora] for micro in run.micros]

    for step, batches in run.steps_with(batches_of):
        set_learning_rate(optimizer, linear(step, config.steps, config.warmup, config.learning_rate))
        masked, tokens = [], []  # per corpus, how many the step has: losses are means over all of them
        for kind in zip(*batches):
            masked.append(context.mean(sum(len(batch.targets) for batch in kind)) or 1.0)
            tokens.append(context.mean(sum(batch.tokens for batch in kind)))
        for micro, kinds in zip(run.micros, batches):
            seed_all(config.seed, 1 + step, micro)  # so a resumed run equals an uninterrupted one
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP averages gradients once per step
            loss = 0.0
            for batch, of_masked, of_tokens in zip(kinds, masked, tokens):
                with context.autocast():
                    mlm, router_loss, *rtd = forward(*context.send_all(*batch[:4]))
                loss += len(batch.targets) / of_masked * mlm
                loss += batch.tokens / of_tokens * (router_loss + config.lambda_disc * sum(rtd))  # XLM has no rtd
            loss.backward()
            run.add(loss, tokens=len(corpora) * config.micro_tokens)
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=context.world == 1)  # under DDP, gradients stay views of its buckets
        model.after_step(context.sum)  # routers update their state, such as norms on a hypersphere
        if run.due(step + 1):
            maskings = config.eval_maskings if step + 1 == config.steps else 1
            scores = evaluate(model, held_out, config, context, run.extra["untrained"], maskings)
            run.extra["scores"] = scores
            translation = scores["translation"]
            if translation["with"] > translation["without"] + 0.02:  # translations help: the languages are aligned
                run.extra.setdefault("since_step", step + 1)
            record = {"flops": (step + 1) * work, "held_out": scores}
            run.save(step + 1, record, f"{record['flops']:.2e} FLOPs\n{describe(scores)}", scores["loss"])

    measured = {"held_out": run.extra["scores"], "since_step": run.extra.get("since_step"), "counting": counted}
    measured["flops_served"] = config.steps * step_flops(model, measured["held_out"]["layers"])
    return run.finish(measured | {"parameters": parameters, "flops": config.steps * work})


def open_data(config: Config, context) -> dict[str, MaskedData | PairData]:
    """Opens both corpora. Raises ValueError if their vocabularies differ."""
    options = {"exponent": config.sampling_exponent, "mask_share": config.mask_share, "replace": MASKS[config.masks]}
    sentences = MaskedData.open(config.data, config, context, **options)
    pairs = PairData.open(config.pairs, config, context, **options)
    if sentences.tokenizer.sha256 != pairs.tokenizer.sha256:
        problem = "have different tokenizers: prepare both with the same --tokenizer"
        raise ValueError(f"{config.data} and {config.pairs} {problem}")
    return {"sentences": sentences, "pairs": pairs}


def build(config: Config, data: dict, context) -> Electra | MaskedLM:
    """A new model."""
    seed_all(config.seed)
    network = Electra if config.objective == "rtd" else MaskedLM
    model = context.place(network(config, data["pairs"].vocab_size))
    if config.frequency_bias:
        getattr(model, "generator", model).bias.data.copy_(data["sentences"].log_frequencies())
    return model


def step_flops(model: Electra | MaskedLM, layers: tuple | list = ()) -> float:
    """Training FLOPs of a step. A backward pass counts as two forward passes, a pair as a row of block_size tokens.

    layers: the sparse layers' statistics, to count the experts that served; default: full capacity.
    """
    config, D = model.config, model.config.n_embd
    generator = getattr(model, "generator", model)
    head = config.mask_share * flops.masked_head_flops(generator)  # only masked tokens pass through it
    forward = flops.flops_per_token(generator.encoder, generator.config, head)
    if config.objective == "rtd":
        head = 2 * D * D + 2 * D
        forward += flops.flops_per_token(model.encoder, config, head)
    forward = flops.as_served(model, forward, layers)
    batches = 1 + config.tlm  # of sentences, and of pairs
    return 3 * batches * config.batch_tokens * forward


def describe(scores: dict) -> str:
    """An evaluation in words: lines for sentences, pairs, alignment, and each sparse layer."""
    lines = []
    for kind in ("sentences", "pairs"):
        held_out = scores[kind]
        line = f"{in_perplexity(held_out['mlm'])}, {held_out['generator']:.1%} right"
        if "rtd" in held_out:
            saved = f"{abs(held_out['saved']):.1%} {'above' if held_out['saved'] < 0 else 'below'} a blind guess"
            line = f"generator: {line}; discriminator: loss {held_out['rtd']:.4f}, {saved}, "
            line += "{accuracy:.1%} right, {replaced:.1%} replaced".format(**held_out)
        lines.append(f"held-out {kind}: {line}")
    line = "masked tokens of one half of a pair: {with:.2%} right with the translation, {without:.2%} without"
    lines.append(line.format(**scores["translation"]))
    layer = crosslingual.middle_layer(len(scores["retrieval"]) - 1)
    accuracy, centred, untrained = (scores[name][layer] for name in ("retrieval", "centred", "untrained"))
    line = f"held-out translations retrieved by layer {layer}: {accuracy:.1%} ({scores['chance']:.1%} by chance), "
    lines.append(f"{line}{centred:.1%} with language means removed ({untrained:.1%} untrained)")
    for i, moe in enumerate(scores["layers"], 1):
        lines.append(f"sparse layer {i}: {describe_routing(moe)}")
    return "\n".join(lines)


def report(config: Config, result: dict) -> str:
    """A result in words."""
    title = f"{result['name']}, {result['flops']:.2e} FLOPs, {config.eval_maskings} maskings"
    lines = ["", title, describe(result["held_out"]), counting.in_words(result["counting"])]
    since, translation = result["since_step"], result["held_out"]["translation"]
    gain = f"{100 * (translation['with'] - translation['without']):.1f} points"
    words = f"translations help since step {since}; in the end they raise the accuracy on masked tokens by {gain}"
    lines.append(words if since else "translations do not help yet: increase --steps")
    return "\n".join(lines)


def main():
    config, context = start(Config, PRESETS)
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
