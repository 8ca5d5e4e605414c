"""XMoE's and X-MoE's translation models: an encoder-decoder with sparse experts and any router.

    python train_mt.py                                         the demo: three ciphers to readable English
    python train_mt.py --router switch                         another router, with equal parameters and FLOPs
    python -m data.prepare multi30k-de --source DIR            prepare Multi30k, then train:
    python train_mt.py --preset multi30k                       German captions to English
    torchrun --nproc_per_node 4 train_mt.py --preset wmt23 --data wmt23-uk       the paper's model, on 4 GPUs
    python train_mt.py --table 3                               every row of a table, next to the paper's numbers
    python train_mt.py --translate FILE --model out/train_mt/multi30k      translate a file with a trained model

Each evaluation prints cross entropy, how each MoE layer routes, and validation BLEU and chrF2++. A run ends with the
test scores of the weights with the best validation BLEU, with the evaluation's capacity limit (the paper's protocol)
and without one, next to two trivial baselines: a translation memory and a lookup of single tokens. It lives in
out/train_mt/NAME; the same command resumes it. `--help` lists all constants.
"""

import math
import signal
import sys
from collections import ChainMap
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch

from data.batches import TranslationData, source_batches
from data.ciphers import VISIBLE
from data.files import progress, read_lines
from data.tokenizers import XLMR
from engine import parallel, pretrained
from engine.device import clear_errors, seed_all, warn
from engine.optim import adamw, clip_gradients, inverse_sqrt, set_learning_rate
from engine.run import SIGNALS, Run, stop
from engine.table import Table, carry_out, start
from metrics import flops, in_perplexity, perplexity
from metrics.bleu import mean, score_counting, score_translations
from metrics.routing import RoutingStats, describe_routing, losses_in_words, mean_over_layers
from model import Translator, nonpad_mask, rows_of
from routers import ROUTERS

# ---------------------------------------------------------------------------------------------------------------------
# Constants: edit one here, or pass --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, multi30k, wmt23 (XMoE) or wmt10 (X-MoE)
    table: int | None = None  # run every row of XMoE's table 3 or X-MoE's table 4 at the preset's scale
    seeds: int = 1  # train this many seeds and report mean and standard deviation
    data: str = "ciphers-mt"  # a folder with de-en.de and de-en.en, a corpus under data/prepared, or a prepared folder
    target: str = "en"  # language to translate into
    sampling_exponent: float = 1.0  # a language pair is sampled in proportion to its size to this power
    seed: int = 0  # seed of weights, data order and dropout
    # the model
    n_layer: int = 4  # number of encoder blocks
    decoder_layers: int = 2  # number of decoder blocks
    n_head: int = 4  # number of attention heads (H)
    n_embd: int = 64  # width of the model (D)
    ffn_size: int = 256  # inner width of a dense FFN
    block_size: int = 32  # longest source or translation in tokens (T); longer pairs are left out of training
    dropout: float = 0.0  # dropout after embeddings, attention and FFN
    init_std: float = 0.04  # standard deviation of initial weights
    # its experts: XMoE's, which replace FFNs, or X-MoE's, between encoder layers
    router: str = "threshold"  # dense, a name in routers.ROUTERS, or FILE.py:NAME
    score: Literal["dot", "hypersphere"] | None = None  # token-expert similarity; None: the router's default
    gate: Literal["softmax", "sigmoid"] | None = None  # weight of a chosen expert; None: the router's default
    moe_every: int = 2  # XMoE: every N-th block has experts instead of an FFN
    decoder_moe: bool = True  # XMoE: experts in the decoder too, as in the paper; its code has them in the encoder only
    expert_ffns: int = 8  # XMoE: a sparse layer has the parameters of this many dense FFNs; the paper: 32
    split: int | None = None  # XMoE: parts of a split FFN: expert_ffns * split experts; None: the router's default
    capacity: float = 1.0  # XMoE: compute of the experts relative to a dense FFN; the paper's gamma is capacity * split
    eval_capacity: float | None = None  # capacity at test; None: the same
    moe_after: tuple[int, ...] = ()  # X-MoE: insert a sparse layer after each of these encoder layers, counted from 1
    experts: int = 32  # X-MoE: number of experts per sparse layer (E)
    expert_size: int = 256  # X-MoE: inner width of an expert's FFNs (F)
    expert_layers: int = 3  # X-MoE: pre-norm residual FFNs per expert
    capacity_factor: float = math.inf  # X-MoE: gamma, an expert serves at most gamma * S / E of S tokens; inf: no limit
    top_k: int | None = None  # experts that topk chooses per token (K); None: `split` for XMoE, 1 for X-MoE
    threshold: float = 0.3  # the chosen experts' probabilities must sum to this t; the paper: 0.9
    eval_threshold: float | None = None  # threshold at test; None: the same
    routing_dim: int | None = None  # dimension that routers project to (d_e); 0: none; None: E / 2 on a hypersphere
    init_temperature: float | None = None  # initial temperature tau_0 on a hypersphere; None: the paper's for the gate
    router_std: float = 0.04  # standard deviation of initial router weights
    balance_coef: float = 0.01  # weight of the balance loss (alpha)
    # training
    steps: int = 2000  # optimizer steps
    batch_tokens: int = 2048  # tokens per step over all processes, sources and translations with padding
    micro_tokens: int = 2048  # tokens per forward pass; changes results under a capacity limit
    learning_rate: float = 4e-3  # learning rate at the end of the warm-up, its peak
    warmup_steps: int = 200  # steps of linear warm-up; then the rate falls as 1 / sqrt(step)
    beta2: float = 0.98  # Adam's beta2, the decay rate of its average of squared gradients
    eps: float = 1e-8  # Adam's epsilon, added to the denominator of its update
    weight_decay: float = 1e-4  # weight decay of matrices and embeddings
    grad_clip: float = 0.0  # clip the gradient to this norm; 0: no clipping
    label_smoothing: float = 0.1  # share of the target probability that is spread over the vocabulary
    eval_every: int = 250  # evaluate and save a checkpoint every N steps
    eval_tokens: int = 1 << 20  # validation tokens per evaluation of the loss, at most
    eval_sentences: int = 100  # validation sentences to translate for BLEU, at most, per language pair
    log_every: int = 10  # report the training loss every N steps
    # translating
    beam: int = 5  # number of hypotheses per sentence in beam search
    length_penalty: float = 1.0  # exponent of the length that divides a translation's log probability
    translate: str | None = None  # do not train: translate the lines of this file (- for standard input)
    model: str = "out/train_mt/demo"  # folder of the run whose model translates
    # where and how
    out_dir: str = "out/train_mt"  # folder of all runs
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; None: for bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: saves memory at the cost of a second forward pass
    resume: bool = True  # resume from the newest checkpoint; false: start over

    def unread(self) -> set[str]:
        """Constants that this run ignores, given its others: see engine/config.py."""
        if self.translate is not None:
            read = {"translate", "model", "beam", "length_penalty", "micro_tokens", "device", "dtype"}
            return vars(self).keys() - read
        names = {"model"}
        if self.moe_after:
            return names | {"moe_every", "decoder_moe", "expert_ffns", "split", "capacity", "eval_capacity"}
        return names | {"experts", "expert_size", "expert_layers", "capacity_factor"}


# Real text is longer, and a model can overfit it.
REAL = dict(dropout=0.3, threshold=0.9, expert_size=512, warmup_steps=512, eval_sentences=3000, dtype="auto")
MULTI30K = REAL | dict(data="multi30k-de", n_embd=128, ffn_size=512)  # German captions: 8 minutes on one core
MULTI30K |= dict(block_size=128, learning_rate=2e-3, steps=1500, eval_every=500)
# XMoE 4.2 and its authors' configurations; batch size and steps are ours, since the papers give none.
PAPER = REAL | dict(n_layer=12, decoder_layers=6)
PAPER |= dict(n_head=8, n_embd=512, ffn_size=2048)
PAPER |= dict(block_size=256, learning_rate=5e-4)
PAPER |= dict(batch_tokens=1 << 18, micro_tokens=1 << 14)
PAPER |= dict(steps=50_000, eval_every=2_500, log_every=50)
X_MOE = dict(router="hypersphere", moe_after=(6,), expert_size=2048)
PRESETS = {
    "demo": {},
    "multi30k": MULTI30K,
    "wmt23": PAPER | dict(data="wmt23-de", expert_ffns=32),
    "wmt10": PAPER | X_MOE | dict(data="wmt10", sampling_exponent=0.7),
}

# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows, and the paper's BLEU and chrF2++

LANGUAGES = ("uk", "de", "ru", "he", "zh", "mean")
TABLE3 = [  # method, router, split, the paper for each language
    ("dense", "dense", 1, "29.2 / 53.0 | 28.2 / 52.2 | 25.3 / 50.9 | 32.8 / 58.0 | 16.7 / 43.4 | 26.4 / 51.5"),
    ("Switch", "switch", 1, "29.9 / 53.9 | 29.2 / 53.1 | 26.7 / 52.0 | 34.9 / 59.7 | 17.4 / 44.8 | 27.6 / 52.7"),
    ("top-2", "topk", 2, "30.7 / 54.6 | 29.2 / 53.1 | 27.4 / 53.5 | 35.9 / 60.9 | 17.6 / 44.9 | 28.2 / 53.4"),
    ("top-4", "topk", 4, "30.9 / 54.9 | 29.3 / 53.1 | 27.8 / 53.5 | 36.3 / 60.9 | 17.7 / 45.1 | 28.4 / 53.5"),
    ("XMoE", "threshold", 2, "31.7 / 55.7 | 29.4 / 53.3 | 28.4 / 54.0 | 36.1 / 60.5 | 18.1 / 45.6 | 28.7 / 53.8"),
    ("XMoE", "threshold", 4, "32.0 / 55.7 | 29.2 / 53.2 | 28.5 / 53.9 | 35.5 / 60.1 | 18.0 / 45.4 | 28.7 / 53.7"),
]
# X-MoE's table 4: method, the row's constants. Our copy of the paper lacks its numbers.
TABLE4 = {
    "dense": dict(router="dense"),
    "one expert for all": dict(router="switch", experts=1),  # ours, with the compute per token of the next two
    "SMoE": dict(router="switch"),
    "X-MoE": dict(router="hypersphere"),
}


def table3(base: Config) -> Table:
    """Every router, with equal expert parameters and FLOPs; at the paper's scale, one model per language."""
    if base.moe_after:
        raise ValueError("table 3 replaces FFNs with experts: not with moe_after, nor with preset wmt10")
    language = base.data.rpartition("-")[2]
    corpora = {language if language in LANGUAGES else "mean": base.data}
    if base.preset == "wmt23" and base.data == PRESETS["wmt23"]["data"]:
        corpora = {language: f"wmt23-{language}" for language in LANGUAGES if language != "mean"}
    rows = []
    for method, router, split, paper in TABLE3:
        experts, change = "", {"router": router}
        if router != "dense":
            experts = f"{base.expert_ffns * split} x {base.ffn_size // split}"
            if split != ROUTERS[router].split:
                change["split"] = split
        for language, data in corpora.items():
            numbers = paper.split(" | ")[LANGUAGES.index(language)]
            rows.append(((method, experts, language, numbers), change | {"data": data}))
    title = "XMoE table 3: test BLEU and chrF2++ of every router at equal FLOPs"
    return Table(title, ("method", "experts", "language", "paper"), rows)


def table4(base: Config) -> Table:
    """X-MoE's layer in the middle of the encoder, many languages to English."""
    depth = base.moe_after or (max(1, base.n_layer // 2),)
    rows = []
    for method, change in TABLE4.items():
        rows.append(((method,), change | {"moe_after": depth}))
    return Table("X-MoE table 4: test BLEU and chrF2++ of many languages to English", ("method",), rows)


def cells(result: dict) -> dict:
    """A row of either table; `rows kept`: experts served per token, the mean over MoE layers."""
    row = {"params, M": (result["parameters"]["total"] / 1e6, ".1f")}
    for where, note in {"test": "", "test_no_limit": ", no limit"}.items():
        scores = result[where]
        row[f"BLEU{note}"] = scores["bleu"], ".2f"
        row[f"chrF2++{note}"] = scores["chrf"], ".2f"
        row[f"rows kept{note}"] = mean_over_layers("served", scores["layers"]), ".2f"
    for baseline in ("memory", "lookup"):
        for metric, column in {"bleu": "BLEU", "chrf": "chrF2++"}.items():
            row[f"{column}, {baseline}"] = result.get(baseline, {}).get(metric), ".2f"
    row["BLEU, valid"] = result["best"]["bleu"], ".2f"
    pairs = result["test"]["pairs"]
    if 1 < len(pairs) <= 10:  # more columns would not fit
        for name, pair in pairs.items():
            row[name] = pair["bleu"], ".2f"
            row[f"{name}, chrF2++"] = pair["chrf"], ".2f"
    return row


TABLES = {3: table3, 4: table4}

# ---------------------------------------------------------------------------------------------------------------------
# Translating and scoring


@torch.no_grad()
def translate(model: Translator, source, nonpad, tokenizer, beam=5, length_penalty=1.0, limit=False) -> list:
    """Beam search: the ids of the best translation of each of B sources, without <s> and </s>.

    source (B, N) ends in </s>; nonpad: see `Translator.encode`. A source of n tokens before </s> gets a translation
    of at most 1.2 n + 10 tokens. A finished hypothesis scores its log probability divided by its length, including
    </s>, to the power of `length_penalty`; a sentence is done when K hypotheses are finished or its beams reach the
    maximum length. Experts have no capacity limit, so a translation depends on its source alone; limit: use the
    evaluation's. Keys and values are cached, so each step reads one token.
    """
    K, V, (B, N) = beam, model.vocab_size, source.shape
    device = source.device
    never = torch.tensor(tokenizer.unwritten, device=device)  # tokens that are never generated
    is_end = torch.arange(V, device=device) == tokenizer.eos
    length = source.new_full((B,), N)  # with </s>
    if nonpad is not None:
        length = nonpad_mask(source, nonpad).sum(dim=1)
    longest = 6 * (length - 1) // 5 + 10
    written = source.new_full((B, K, 1), tokenizer.bos)  # tokens of each beam
    score = torch.zeros(B, K, device=device)
    score[:, 1:] = -math.inf  # all beams start equal, so only one continues
    finished = [[] for _ in range(B)]  # per sentence, pairs of a score and ids
    searched = list(range(B))  # indices of the b unfinished sentences
    was_training = model.training
    model.eval()
    with nullcontext() if limit else model.no_limit():
        encoded, _ = model.encode(source, nonpad)
        past = None
        while searched:
            t = written.shape[2]  # length, with </s>, of a translation that ends now
            h, _, past = model.decode(written[:, :, -1:].flatten(0, 1), encoded, past)
            log_probs = model.log_probabilities(h[:, -1])  # (b * K, V)
            log_probs[:, never] = -math.inf
            total = log_probs.unflatten(0, (-1, K))  # (b, K, V)
            total += score.unsqueeze(2)
            must_end = longest < t  # (b,)
            total[must_end] = total[must_end].where(is_end, -math.inf)
            best, index = total.flatten(1).topk(2 * K)  # (b, 2 K), best first
            parent, token = index // V, index % V
            ends = token == tokenizer.eos
            for i, j in (ends & (best > -math.inf))[:, :K].nonzero().tolist():
                value = float(best[i, j]) / t**length_penalty
                finished[searched[i]].append((value, written[i, parent[i, j], 1:].tolist()))
            # At most K of the 2 K best continuations end, one per beam, so at least K continue.
            continuing = ends.int().argsort(dim=1, stable=True)[:, :K]
            score = best.gather(1, continuing)
            parent = parent.gather(1, continuing)
            token = token.gather(1, continuing)
            written = written.take_along_dim(parent.unsqueeze(2), dim=1)
            written = torch.cat([written, token.unsqueeze(2)], dim=2)
            full = [len(finished[sentence]) >= K for sentence in searched]
            unfinished = [i for i, is_last in enumerate(must_end.tolist()) if not (is_last or full[i])]
            rows = parent + K * torch.arange(len(searched), device=device).unsqueeze(1)
            past = rows_of(past, rows[unfinished].flatten())
            if len(unfinished) < len(searched):
                encoded = encoded.sentences(unfinished)
                written, score = written[unfinished], score[unfinished]
                longest = longest[unfinished]
                searched = [searched[i] for i in unfinished]
    model.train(was_training)
    return [max(hypotheses)[1] for hypotheses in finished]


def translate_texts(model: Translator, texts: list[str], tokenizer: XLMR, config, context, limit=False) -> list[str]:
    """Translates each text into one line of detokenized text; a text without tokens into an empty one."""
    ids, room = tokenizer.encode_batch(texts), model.config.block_size - 1
    too_long = sum(len(text) > room for text in ids)
    if too_long:
        warn(f"{too_long} of {len(ids)} texts are cut to block_size - 1 = {room} tokens")
    sources = {number: [*text[:room], tokenizer.eos] for number, text in enumerate(ids) if text}
    budget = config.micro_tokens // 2  # about as many source tokens as in training, since capacity depends on them
    batches = [*source_batches(sources, tokenizer.pad, budget)]
    translations = {}  # by number of the text
    for numbers, batch in progress(batches[context.rank :: context.world], "translating"):
        source, nonpad = context.send_all(*batch)
        with context.autocast():
            best = translate(model, source, nonpad, tokenizer, config.beam, config.length_penalty, limit)
        for number, translation in zip(numbers, best):
            text = tokenizer.decode(translation)
            translations[number] = " ".join(text.split())  # a token may be a line feed
    translations = ChainMap(*context.gather(translations))
    return [translations.get(number, "") for number in range(len(texts))]


def score_split(model, data: TranslationData, split: str, config: Config, context, count=None, limit=True) -> dict:
    """Translates the first `count` sentences per language pair (None: all) -> scores, examples, routing statistics."""
    watches = list(map(RoutingStats, model.moe_layers))
    pairs, texts = {}, []
    for name in data.languages:
        sources, references = (side[:count] for side in data.texts(split, name))
        if sources:
            translations = translate_texts(model, sources, data.tokenizer, config, context, limit)
            pairs[name] = score_translations(translations, references, config.target)
            texts += [(name, *sentence) for sentence in zip(sources, references, translations)]
    stride = max(1, len(texts) // 5)
    return mean(pairs.values()) | {
        "pairs": pairs,
        "sentences": len(texts),
        "examples": texts[stride // 2 :: stride][:5],
        "layers": [watch.finish(context.gather) for watch in watches],
    }


@torch.no_grad()
def evaluate(model: Translator, data: TranslationData, split: str, context, max_tokens: int) -> dict:
    """Cross entropy of reference translations (without smoothing) and routing statistics."""
    model.eval()
    watches = list(map(RoutingStats, model.moe_layers))
    sums = torch.zeros(2, dtype=torch.float64)  # cross entropy, tokens
    for number, batch in enumerate(data.eval_batches(split, max_tokens, context.rank, context.world)):
        seed_all(model.config.seed, 0, 1 + context.rank + number * context.world)  # for routers that sample
        with context.autocast():
            loss, _ = model(*context.send_all(*batch))
        sums += len(batch.labels) * torch.tensor([float(loss), 1.0], dtype=torch.float64)
    loss, tokens = context.sum(sums).tolist()
    model.train()
    return {
        "loss": loss / tokens,
        "ppl": perplexity(loss / tokens),
        "tokens": int(tokens),
        "layers": [{"name": name} | watch.finish(context.gather) for name, watch in zip(model.moe_names, watches)],
    }


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Trains a translator, or resumes training -> the content of result.json."""
    with clear_errors():
        options = {"exponent": config.sampling_exponent, "target": config.target}
        data = TranslationData.open(config.data, config, context, **options)
        run = Run(config, PRESETS, context, data)
        if run.result:
            return run.result
        score_translations([""], [""], config.target)  # fails early if a package for this language is missing
        seed_all(config.seed)
        model = context.place(Translator(config, data.vocab_size))
        counts = data.meta["splits"]["train"]
        length = counts["tokens"] / counts["pairs"] / 2
        parameters = flops.count_parameters(model)
        work = flops.translation_flops(model, length, length)
        size = "{total:,} parameters, {active:,.0f} active per token".format(**parameters)
        context.say(f"{run.name}: {size}; {work / 1e6:.1f} forward MFLOPs per pair of 2 x {length:.1f} tokens")
        left_out = ", ".join(f"{count:,} {split}" for split, count in data.left_out.items())
        context.say(f"{counts['pairs']:,} pairs; left out because they are longer than block_size: {left_out}")
        counting = score_counting(data)
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        run.resume(model, optimizer, work / (2 * length), "smoothed loss {:.4f}".format)

    for step in run.steps():
        set_learning_rate(optimizer, inverse_sqrt(step, config.warmup_steps, config.learning_rate))
        batches = [data.batch("train", step, micro) for micro in run.micros]
        predicted = context.mean(sum(len(batch.labels) for batch in batches))
        for micro, batch in zip(run.micros, batches):
            seed_all(config.seed, 1 + step, micro)  # so a resumed run equals an uninterrupted one
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP averages gradients once per step
            with context.autocast():
                loss, router_loss = forward(*context.send_all(*batch))
            share = len(batch.labels) / predicted  # a step's loss is the mean over all its predicted tokens
            (share * (loss + router_loss)).backward()
            run.add(share * loss, tokens=batch.tokens)
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step(context.sum)  # routers update their state, such as norms on a hypersphere
        if run.due(step + 1):
            scores = evaluate(model, data, "valid", context, config.eval_tokens)
            run.check_finite(scores["loss"], step + 1)  # NaN weights cannot translate
            valid = score_split(model, data, "valid", config, context, config.eval_sentences)
            best, bleu_chrf = run.extra.get("best", {}), {name: valid[name] for name in ("bleu", "chrf")}
            if tuple(bleu_chrf.values()) > (best.get("bleu", -1), best.get("chrf", 0)):
                weights = {name: x.to("cpu", copy=True) for name, x in model.state_dict().items()}
                run.extra["best"] = bleu_chrf | {"step": step + 1, "model": weights}
            scores |= bleu_chrf
            run.save(step + 1, scores, f"valid {describe(scores)}", scores["loss"])

    result = test(model, data, run, config, context) | counting
    result["flops_served_per_pair"] = flops.as_served(model, work, result["test"]["layers"], length)
    return run.finish(result | {"parameters": parameters, "flops_per_pair": work})


def test(model: Translator, data: TranslationData, run: Run, config: Config, context) -> dict:
    """Test scores of the weights with the best validation BLEU, which are saved as model.pt."""
    best = run.extra["best"]
    model.load_state_dict(best["model"])
    run.save_model("model.pt", model, best["step"])
    scores = unlimited = score_split(model, data, "test", config, context)  # with the limit: the paper's protocol
    if model.limited_at_test:
        unlimited = score_split(model, data, "test", config, context, limit=False)
    return {"test": scores, "test_no_limit": unlimited, "best": {"step": best["step"], "bleu": best["bleu"]}}


def in_words(scores: dict) -> str:
    return "BLEU {bleu:.2f}  chrF2++ {chrf:.2f}".format(**scores)


def describe(scores: dict) -> str:
    """An evaluation in words, with a line per MoE layer."""
    text = f"{in_perplexity(scores['loss'])}  {losses_in_words(scores['layers'])}  {in_words(scores)}"
    for layer in scores["layers"]:
        text += f"\n  {layer['name']}: {describe_routing(layer)}"
    return text


def report(config: Config, result: dict) -> str:
    """A result in words."""
    scores, unlimited = result["test"], result["test_no_limit"]
    best = result["best"]
    lines = [f"\n{result['name']}, test; beam {config.beam}, length penalty {config.length_penalty:g}"]
    lines.append(f"weights of step {best['step']}, with the best validation BLEU: {best['bleu']:.2f}")
    lines.append("under the limit: " * (unlimited != scores) + in_words(scores))
    if unlimited != scores:
        lines.append(f"without a limit: {in_words(unlimited)}")
    for name, pair in scores["pairs"].items():
        lines.append(f"  {name:12} {in_words(pair)}")
        if result["memory"]:
            for baseline in ("memory", "lookup"):
                lines.append(f"    {baseline:10} {in_words(result[baseline]['pairs'][name])}")
    lines.append("BLEU {bleu_signature}\nchrF2++ {chrf_signature}\n".format(**pair))  # the same for all pairs
    for name, source, reference, translation in unlimited["examples"]:
        sample = f"{name}: {source}\n  reference: {reference}\n  model:     {translation}"
        lines.append(sample.translate(VISIBLE))
    return "\n".join(lines)


AT_ONCE = 500  # lines that are translated before the first of them is printed


def translate_file(config: Config, context):
    """Prints the translation of each line of a file; empty lines stay empty."""
    with clear_errors():
        model, tokenizer = pretrained.load(config.model)  # the best weights, or the latest of an unfinished run
        if not isinstance(model, Translator):
            raise ValueError(f"{config.model} is not a translator: pass --model the folder of a train_mt.py run")
        lines = [*map(str.strip, read_lines(Path(config.translate)))] if context.rank == 0 else []
    [lines, *_] = context.gather(lines)  # standard input can be read only once
    if not sys.stdout.isatty():  # to a file: UTF-8 in any locale
        sys.stdout.reconfigure(encoding="utf-8")
    model = context.place(model)
    done = 0
    for number in SIGNALS:
        signal.signal(number, lambda number, _: stop(number, f" after {done:,} lines", "they are translated"))
    for done in range(0, len(lines), AT_ONCE):
        context.say("\n".join(translate_texts(model, lines[done : done + AT_ONCE], tokenizer, config, context)))
    context.barrier()  # processes exit together: see engine/table.py


def main():
    config, context = start(Config, PRESETS)
    if config.translate is not None:
        translate_file(config, context)
        return
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
