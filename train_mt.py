"""XMoE's and X-MoE's translation models: an encoder-decoder with sparse experts under any router.

    python train_mt.py                                         the demo: five languages to English, some 800 texts each
    python train_mt.py --router switch                         another router, with equal parameters and FLOPs
    python -m data.prepare multi30k-de --source DIR            then
    python train_mt.py --preset multi30k                       German captions to English
    torchrun --nproc_per_node 4 train_mt.py --preset wmt23 --data wmt23-uk       the paper's model, on 4 GPUs
    python train_mt.py --table 3                               every row of a table, beside the paper's numbers
    python train_mt.py --translate FILE --model out/train_mt/multi30k      a trained model, line by line

Prints, at every evaluation, cross entropy, how each MoE layer routes, and BLEU and chrF2++ of the validation set; in
the end those of the test set, with the weights whose validation BLEU was best, under the evaluation's capacity limit
(the paper's protocol) and without one, and five translations. A run is kept in out/train_mt/NAME; the same command
goes on where it stopped. `--help` lists every constant.
"""

import math
import re
import signal
import sys
from collections import ChainMap
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from tqdm import tqdm

from analysis import flops, measures
from data import counting
from data.batches import Translation, TranslationData, source_batches
from data.files import read_lines
from data.tokenizers import XLMR
from engine import parallel, pretrained
from engine.config import refuse_others
from engine.device import clear_errors, seed_all, warn
from engine.optim import adamw, cross_entropy, inverse_sqrt, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, start
from model import Translator, real_mask, rows_of
from routers import ROUTERS

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, multi30k, wmt23 (XMoE) or wmt10 (X-MoE)
    table: int | None = None  # run every row of XMoE's table 3 or X-MoE's table 4 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs-en"  # a corpus of translation pairs under data/prepared, or the folder of a prepared one
    target: str = "en"  # the language to translate into, from the other of each pair
    sampling_exponent: float = 1.0  # a pair of languages is drawn in proportion to its size to this power
    seed: int = 0  # of weights, data order and dropout
    # the model
    n_layer: int = 4  # blocks of the encoder
    decoder_layers: int = 2  # blocks of the decoder
    n_head: int = 4  # H
    n_embd: int = 128  # D
    ffn_size: int = 512  # inner width of a dense FFN
    block_size: int = 128  # longest source and longest translation in training; longer pairs are left out
    dropout: float = 0.3  # after embeddings, attention and FFN
    init_std: float = 0.04  # of the normal that weights start from
    # its experts: XMoE's, in place of FFNs, or X-MoE's, between the encoder's layers
    router: str = "threshold"  # dense, or a name in routers.ROUTERS
    score: Literal["dot", "hypersphere"] | None = None  # how well a token fits an expert; None: the router's
    gate: Literal["softmax", "sigmoid"] | None = None  # the weight of a chosen expert; None: the router's
    moe_every: int = 2  # XMoE: every so many blocks have experts in place of their FFN
    decoder_moe: bool = True  # XMoE: in the decoder, too (the text; the authors' runs have the encoder's alone)
    expert_ffns: int = 8  # XMoE: a sparse layer has as many parameters as so many FFNs; the paper: 32
    split: int | None = None  # XMoE: parts of an FFN's width, expert_ffns * split experts; None: the router's
    capacity: float = 1.0  # XMoE: work of the experts, in dense FFNs; the paper's gamma is capacity * split
    eval_capacity: float | None = None  # at test; None: the same
    moe_after: tuple[int, ...] = ()  # X-MoE: sparse layers stand behind these layers of the encoder, from 1
    experts: int = 32  # X-MoE: E
    expert_size: int = 512  # X-MoE: F
    expert_layers: int = 3  # X-MoE: FFNs of an expert, each with a norm and a residual around it
    top_k: int = 1  # X-MoE: K, experts per token
    capacity_factor: float = math.inf  # X-MoE: gamma; inf: no limit
    eval_capacity_factor: float | None = None  # at test; None: the same
    threshold: float = 0.9  # t, the probability that the chosen experts must reach together
    eval_threshold: float | None = None  # at test; None: the same
    routing_dim: int | None = None  # d_e, what the router projects to; 0: nothing; None: on a hypersphere E / 2
    init_temperature: float | None = None  # tau_0 of a hypersphere; None: the gate's
    router_std: float = 0.04  # of the normal that a router's weights start from
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    # training
    steps: int = 1500  # optimizer steps
    batch_tokens: int = 2048  # tokens of a step, both sides with their padding, over all processes and micro-batches
    micro_tokens: int = 2048  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 2e-3  # peak
    warmup_steps: int = 512  # steps to the peak; then it falls as 1 / sqrt(step)
    beta1: float = 0.9  # Adam
    beta2: float = 0.98  # Adam
    eps: float = 1e-8  # Adam
    weight_decay: float = 1e-4  # of matrices and embeddings
    grad_clip: float = 0.0  # largest norm of the gradient; 0 for no limit
    label_smoothing: float = 0.1  # share of the target that is spread over the vocabulary
    eval_every: int = 300  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 20  # validation tokens of each loss, at most
    eval_sentences: int = 3000  # validation sentences of each BLEU, at most, from every pair of languages
    log_every: int = 10  # steps from one look at the loss to the next
    # translating
    beam: int = 5  # beams of a translation
    length_penalty: float = 1.0  # a translation's log probability is divided by its length to this power
    translate: str | None = None  # no training: translate this file, or - for standard input, with a trained model
    model: str = "out/train_mt/demo"  # the folder of its run
    # where and how
    out_dir: str = "out/train_mt"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    expert_parallel: int = 1  # processes that share out the experts of one model, see engine/parallel.py
    shard: bool = False  # weights and their state lie in pieces over all processes (FSDP2)
    compile: bool = False  # torch.compile
    recompute: bool = False  # blocks compute again in the backward pass what they would else keep in memory
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    tensorboard: bool = False  # every evaluation goes to TensorBoard, too: tensorboard --logdir out

    @property
    def where(self) -> set[str]:
        """Constants that make no other run: what a trained model is to translate."""
        return {"translate", "model"}

    def unread(self) -> set[str]:
        """Constants that a run does not read because of others."""
        names = {"model"} if self.translate is None else set()
        if self.moe_after:
            return names | {"moe_every", "decoder_moe", "expert_ffns", "split", "capacity", "eval_capacity"}
        return names | {"experts", "expert_size", "expert_layers", "top_k", "capacity_factor", "eval_capacity_factor"}


# XMoE 4.2 and its authors' configurations; the papers are silent on batch and steps: those are ours.
PAPER = dict(
    n_layer=12,
    decoder_layers=6,
    n_embd=512,
    ffn_size=2048,
    n_head=8,
    block_size=256,
    learning_rate=5e-4,
    warmup_steps=512,
    batch_tokens=1 << 18,
    micro_tokens=1 << 14,
    steps=50_000,
    eval_every=2_500,
    log_every=50,
)
X_MOE = dict(router="hypersphere", moe_after=(6,), expert_size=2048)
PRESETS = {
    "demo": {},
    "multi30k": dict(data="multi30k-de", eval_every=500),  # German captions to English: 8 minutes on one core
    "wmt23": PAPER | dict(data="wmt23-de", expert_ffns=32, recompute=True),
    "wmt10": PAPER | X_MOE | dict(data="wmt10", sampling_exponent=0.7),
}

# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows, and the paper's BLEU and chrF2++

LANGUAGES = ("uk", "de", "ru", "he", "zh", "mean")
TABLE3 = [  # method, router, split, for each language
    ("dense", "dense", 1, "29.2 / 53.0 | 28.2 / 52.2 | 25.3 / 50.9 | 32.8 / 58.0 | 16.7 / 43.4 | 26.4 / 51.5"),
    ("Switch", "switch", 1, "29.9 / 53.9 | 29.2 / 53.1 | 26.7 / 52.0 | 34.9 / 59.7 | 17.4 / 44.8 | 27.6 / 52.7"),
    ("top-2", "topk", 2, "30.7 / 54.6 | 29.2 / 53.1 | 27.4 / 53.5 | 35.9 / 60.9 | 17.6 / 44.9 | 28.2 / 53.4"),
    ("top-4", "topk", 4, "30.9 / 54.9 | 29.3 / 53.1 | 27.8 / 53.5 | 36.3 / 60.9 | 17.7 / 45.1 | 28.4 / 53.5"),
    ("XMoE", "threshold", 2, "31.7 / 55.7 | 29.4 / 53.3 | 28.4 / 54.0 | 36.1 / 60.5 | 18.1 / 45.6 | 28.7 / 53.8"),
    ("XMoE", "threshold", 4, "32.0 / 55.7 | 29.2 / 53.2 | 28.5 / 53.9 | 35.5 / 60.1 | 18.0 / 45.4 | 28.7 / 53.7"),
]
# X-MoE's table 4: method, router. Our copy of the paper lacks its numbers.
TABLE4 = [("dense", "dense"), ("SMoE", "switch"), ("X-MoE", "hypersphere")]


def table3(base: Config) -> Table:
    """Every router, with the same parameters and the same FLOPs; at the paper's scale a model for each language."""
    if base.moe_after:
        raise ValueError("table 3 has experts in place of FFNs: not with moe_after, nor with preset wmt10")
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
    """X-MoE's layer half-way in the encoder, many languages to English."""
    depth = base.moe_after or (max(1, base.n_layer // 2),)
    rows = [((method,), {"router": router, "moe_after": depth}) for method, router in TABLE4]
    return Table("X-MoE table 4: test BLEU and chrF2++ of many languages to English", ("method",), rows)


def cells(result: dict) -> dict:
    """A row of either table; `rows kept`: per token, the mean over MoE layers."""
    found = {"params, M": (result["parameters"]["total"] / 1e6, ".1f")}
    for where, note in {"test": "", "test_no_limit": ", no limit"}.items():
        scores = result[where]
        found[f"BLEU{note}"] = scores["bleu"], ".2f"
        found[f"chrF2++{note}"] = scores["chrf"], ".2f"
        found[f"rows kept{note}"] = measures.mean_over_layers("served", scores["layers"]), ".2f"
    found["BLEU, memory"] = result["memory"].get("bleu"), ".2f"
    found["BLEU, valid"] = result["best"]["bleu"], ".2f"
    pairs = result["test"]["pairs"]
    if 1 < len(pairs) <= 10:  # more are no table
        found |= {name: (pair["bleu"], ".2f") for name, pair in pairs.items()}
    return found


TABLES = {3: table3, 4: table4}

# ---------------------------------------------------------------------------------------------------------------------
# Beam search


@torch.no_grad()
def translate(model: Translator, source, real, tokenizer: XLMR, beam=5, length_penalty=1.0, limit=False) -> list:
    """Translates by beam search: for each of B sources the ids of the best translation, without <s> and </s>.

    source (B, N) ends in </s>; real (S,): see `Translator.encode`. Of a source of n tokens before </s> the translation
    has at most 1.2 n + 10. Experts have no capacity limit, so that a translation depends on its source alone; with
    `limit` they have the evaluation's. Keys and values of what is written are kept, so that each step reads one token.
    """
    was_training = model.training
    model.eval()
    limited = limit or model.sees_later  # of experts that choose their tokens, the limit is what chooses
    with nullcontext() if limited else model.no_limit():
        encoded, _ = model.encode(source, real)
        longest = longest_translations(source, real)
        search = Search(longest, beam, tokenizer.bos, tokenizer.eos, length_penalty)
        never = torch.tensor(tokenizer.unwritten, dtype=torch.int64, device=source.device)  # no text is made of these
        past = None
        while len(search.sentence):
            last = search.written[:, :, -1:].flatten(0, 1)  # (b * K, 1)
            h, _, past = model.decode(last, encoded, past)
            scores = model.log_probabilities(h[:, -1])  # (b * K, V)
            scores[:, never] = -math.inf
            rows, stay = search.step(scores)
            if not stay.all():
                encoded = encoded.sentences(stay)
            past = rows_of(past, rows)
    model.train(was_training)
    return search.translations()


def longest_translations(source, real):
    """(B, N) -> (B,): 1.2 n + 10 of a source with n tokens before </s>."""
    n = torch.full_like(source[:, 0], source.shape[1] - 1)
    if real is not None:
        n = real_mask(source, real).sum(dim=1) - 1
    return 6 * n // 5 + 10


class Search:
    """A beam search over B sentences with K beams each; b of the sentences are still searched.

    The value of a translation is the sum of its log probabilities over its length, with </s>, to the power of
    `length_penalty`. A sentence is done when K of its translations have ended among the K best continuations of a step,
    or when it is as long as it may be.
    """

    def __init__(self, longest, K: int, bos: int, eos: int, length_penalty: float):
        """longest (B,): how many tokens a translation may have."""
        B, device = len(longest), longest.device
        self.longest, self.length_penalty = longest, length_penalty
        self.K, self.eos = K, eos
        self.ended = torch.zeros_like(longest)  # (B,) how many translations of a sentence have ended
        width = int(longest.max()) + 1
        self.best = torch.full((B, width), eos, device=device)  # the best of them, filled up with </s>
        self.value = torch.full((B,), -math.inf, device=device)  # and its value
        self.sentence = torch.arange(B, device=device)  # (b,) which sentences are still searched
        self.written = torch.full((B, K, 1), bos, device=device)  # (b, K, 1 + t) <s> and t tokens
        self.score = torch.full((B, K), -math.inf, device=device)  # (b, K) the sum of their log probabilities
        self.score[:, 0] = 0.0  # the beams of a sentence are all alike at first: only one goes on

    def step(self, scores):
        """Goes on by one token: scores (b * K, V), its log probabilities.

        -> (R,) which of the b * K rows go on, in their new order; (b,) bool, which sentences do.
        """
        K, V = self.K, scores.shape[1]
        t = self.written.shape[2] - 1
        last = t >= self.longest[self.sentence]  # (b,)
        not_end = torch.arange(V, device=scores.device) != self.eos
        scores = scores.unflatten(0, (-1, K))  # (b, K, V)
        scores = scores.masked_fill(last[:, None, None] & not_end, -math.inf)
        total = self.score.unsqueeze(2) + scores
        # Of 2 K continuations at most K are ends, so that K go on.
        score, place = total.flatten(1).topk(2 * K)  # (b, 2 K)
        beam, token = place // V, place % V
        self.end(score, beam, token)
        rows = self.extend(score, beam, token)  # (b, K)
        stay = (self.ended[self.sentence] < K) & ~last
        self.sentence = self.sentence[stay]
        self.written = self.written[stay]
        self.score = self.score[stay]
        return rows[stay].flatten(), stay

    def end(self, score, beam, token):
        """Of 2 K continuations, (b, 2 K) each: counts the ends among the K best, and keeps the best translation."""
        ends = (token == self.eos) & score.isfinite()
        ends[:, self.K :] = False
        self.ended[self.sentence] += ends.sum(dim=1)
        length = self.written.shape[2]  # with </s>
        value = score / length**self.length_penalty
        value, which = value.masked_fill(~ends, -math.inf).max(dim=1)  # (b,)
        better = value > self.value[self.sentence]
        sentence = self.sentence[better]
        self.value[sentence] = value[better]
        beam = beam[better, which[better]]
        self.best[sentence, : length - 1] = self.written[better, beam, 1:]

    def extend(self, score, beam, token):
        """Of 2 K continuations, (b, 2 K) each: the K best that are no ends go on -> (b, K) rows that they extend."""
        score = score.masked_fill(token == self.eos, -math.inf)
        self.score, which = score.topk(self.K)
        beam = beam.gather(1, which)  # (b, K)
        token = token.gather(1, which)
        sentence = torch.arange(len(beam), device=beam.device).unsqueeze(1)  # (b, 1)
        written = self.written[sentence, beam]  # (b, K, 1 + t)
        self.written = torch.cat([written, token.unsqueeze(2)], dim=2)
        return self.K * sentence + beam

    def translations(self) -> list[list[int]]:
        ids = self.best.tolist()
        return [row[: row.index(self.eos)] for row in ids]


# ---------------------------------------------------------------------------------------------------------------------
# Translating and scoring


def translate_texts(model: Translator, texts: list[str], tokenizer: XLMR, config, context, limit=False) -> list[str]:
    """The translation of each text, as people write it, in one line. Processes share out batches of like lengths.

    limit: see `translate`. A text of more than block_size - 1 tokens is cut, and a warning says so; the translation of
    a text without tokens is empty.
    """
    ids, room = tokenizer.encode_batch(texts), model.config.block_size - 1
    long = sum(len(text) > room for text in ids)
    if long:
        warn(f"{long} of {len(ids)} texts are cut to block_size - 1 = {room} tokens")
    written = [number for number, text in enumerate(ids) if text]
    sources = [ids[number][:room] for number in written]
    budget = config.micro_tokens // 2  # about as many source tokens as in training, which a capacity counts
    batches = list(source_batches(sources, tokenizer.pad, tokenizer.eos, budget))[context.rank :: context.world]
    found = {}  # number of a text -> its translation
    for numbers, batch in tqdm(
        batches, desc="translating", unit="batch", leave=False, disable=context.rank > 0 or None
    ):
        source, real = context.send_all(*batch)
        with context.autocast():
            best = translate(model, source, real, tokenizer, config.beam, config.length_penalty, limit)
        for number, translation in zip(numbers, best):
            text = tokenizer.decode(translation)
            found[written[number]] = " ".join(text.split())  # a piece may be a line feed
    found = ChainMap(*context.gather(found))
    return [found.get(number, "") for number in range(len(texts))]


def score(translations: list[str], references: list[str], language: str) -> dict[str, float | str]:
    """BLEU and chrF2++ of a corpus. Both sides are texts as people write them: sacrebleu finds the words itself.

    Raises ImportError where sacrebleu, or what it needs for a language, is not installed.
    """
    try:
        from sacrebleu import BLEU, CHRF

        metrics = {"bleu": BLEU(trg_lang=re.split("[-_]", language)[0]), "chrf": CHRF(word_order=2)}  # zh_Hans: zh
    except (ImportError, RuntimeError) as error:  # the second is for Japanese and Korean
        raise ImportError(f"BLEU and chrF2++ need sacrebleu: pip install sacrebleu ({error})") from error
    scores = {}
    for name, metric in metrics.items():
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def score_split(
    model: Translator, data: TranslationData, split: str, config: Config, context, most=None, limit=True
) -> dict:
    """Translates a split, at most so many sentences of each pair of languages (None: all) -> scores of every pair,
    their means, five examples, routing statistics."""
    watches = list(map(measures.RoutingStats, model.moe_layers))
    pairs, texts = {}, []
    for name in data.languages:
        sources, references = (side[:most] for side in data.texts(split, name))
        if sources:
            ours = translate_texts(model, sources, data.tokenizer, config, context, limit)
            pairs[name] = score(ours, references, config.target)
            texts += [(name, *own) for own in zip(sources, references, ours)]
    apart = max(1, len(texts) // 5)
    return {
        "bleu": fmean(pair["bleu"] for pair in pairs.values()),
        "chrf": fmean(pair["chrf"] for pair in pairs.values()),
        "pairs": pairs,
        "sentences": len(texts),
        "examples": texts[apart // 2 :: apart][:5],
        "layers": [watch.finish(context.sum) for watch in watches],
    }


def score_memory(data: TranslationData) -> dict[str, float]:
    """Mean BLEU and chrF2++ of a translation memory on the test set; {} where there is too much text to search it."""
    scores = []
    for name in data.languages:
        remembered = counting.remembered(data, name)
        if remembered:
            _, references = data.texts("test", name)
            scores.append(score(remembered, references, data.target))
    return {metric: fmean(one[metric] for one in scores) for metric in ("bleu", "chrf") if scores}


@torch.no_grad()
def evaluate(model: Translator, data: TranslationData, split: str, context, max_tokens: int) -> dict:
    """Cross entropy of the right translations (not smoothed), balance loss and routing statistics."""
    model.eval()
    watches = list(map(measures.RoutingStats, model.moe_layers))
    sums = torch.zeros(3, dtype=torch.float64)  # cross entropy, balance loss, tokens
    for number, batch in enumerate(data.eval_batches(split, max_tokens, context.rank, context.world)):
        seed_all(model.config.seed, 0, 1 + context.rank + number * context.world)  # for a router that draws
        batch = Translation(*context.send_all(*batch))
        with context.autocast():
            logits, balance = model(batch.source, batch.target, batch.source_real, batch.target_real)
            loss = cross_entropy(logits, batch.labels)
        sums += torch.tensor([float(loss), float(balance), 1.0], dtype=torch.float64) * len(batch.labels)
    loss, balance, tokens = context.sum(sums).tolist()
    model.train()
    return {
        "loss": loss / tokens,
        "ppl": measures.perplexity(loss / tokens),
        "bpb": measures.bits_per_byte(loss / tokens, data.translation_counts(split)),
        "balance": balance / tokens,
        "tokens": int(tokens),
        "layers": [{"name": name} | watch.finish(context.sum) for name, watch in zip(model.moe_names, watches)],
    }


def describe(scores: dict) -> str:
    """What one evaluation found, a line an MoE layer."""
    text = f"{scores['bpb']:.3f} bits per byte, perplexity {scores['ppl']:.2f}  {describe_scores(scores)}"
    if scores["layers"]:
        text += f"  balance {scores['balance']:.3f}"
    for layer in scores["layers"]:
        text += f"\n  {layer['name']}: {measures.describe_routing(layer)}"
    return text


def describe_scores(scores: dict) -> str:
    return f"BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}"


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Trains (or goes on training) a translator -> its result, which is also in result.json."""
    with clear_errors():
        how = {"exponent": config.sampling_exponent, "target": config.target}
        data = TranslationData.open(config.data, config, context, **how)
        run = Run(config, PRESETS, context, data)
        if run.result:
            return run.result
        score([""], [""], config.target)  # is sacrebleu there?
        seed_all(config.seed)
        model = context.place(Translator(config, data.vocab_size))
        counts = data.meta["splits"]["train"]
        length = counts["tokens"] / counts["pairs"] / 2
        parameters, work = flops.count_parameters(model), flops.translation_flops(model, length, length)
        left_out = ", ".join(f"{count:,} {split}" for split, count in data.left_out.items())
        context.say(
            f"{run.name}: {parameters['total']:,} parameters, {parameters['active']:,.0f} active a token; "
            f"{work['total'] / 1e6:.1f} MFLOPs forward a pair of 2 x {length:.1f} tokens; {counts['pairs']:,} pairs of "
            f"{', '.join(data.languages)}; longer than block_size, and left out: {left_out}"
        )
        memory = score_memory(data)
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        run.resume(model, optimizer, work["total"] / (2 * length))

    for step in run.steps():
        set_learning_rate(optimizer, inverse_sqrt(step, config.warmup_steps, config.learning_rate))
        for micro in run.micros:
            seed_all(config.seed, 1 + step, micro)  # all that is random: so a resumed run is the same run
            forward.require_backward_grad_sync = micro == run.micros[-1]  # processes exchange gradients once
            batch = Translation(*context.send_all(*data.batch("train", step, micro)))
            with context.autocast():
                logits, balance = forward(batch.source, batch.target, batch.source_real, batch.target_real)
                loss = cross_entropy(logits, batch.labels, label_smoothing=config.label_smoothing)
            ((loss + config.balance_coef * balance) / len(run.micros)).backward()
            run.add(loss, tokens=batch.tokens)
        parallel.clip_grad_norm_(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()
        if run.due(step + 1):
            now = parallel.whole(model)
            scores = evaluate(now, data, "valid", context, config.eval_tokens)
            run.check_finite(scores["loss"], step + 1)  # broken weights translate nothing
            valid = score_split(now, data, "valid", config, context, config.eval_sentences)
            if valid["bleu"] > run.kept.get("best", {}).get("bleu", -1):
                weights = {name: x.cpu().clone() for name, x in now.state_dict().items()}
                run.kept["best"] = {"step": step + 1, "bleu": valid["bleu"], "model": weights}
            scores |= {"bleu": valid["bleu"], "chrf": valid["chrf"]}
            run.save(step + 1, scores, scores["loss"], f"valid {describe(scores)}")

    model, best = parallel.whole(model), run.kept["best"]
    model.load_state_dict(best["model"])
    run.save_model("model.pt", model, best["step"])
    result = test(model, data, config, context) | {"beam": config.beam, "length_penalty": config.length_penalty}
    result |= {"memory": memory, "parameters": parameters, "flops_per_pair": work}
    return run.finish(result | {"best": {"step": best["step"], "bleu": best["bleu"]}})


def test(model: Translator, data: TranslationData, config: Config, context) -> dict:
    """Scores of the test set at the evaluation gamma (the paper's protocol), and without a limit."""
    scores = free = score_split(model, data, "test", config, context)
    if model.limited_at_test:
        free = score_split(model, data, "test", config, context, limit=False)
    return {"test": scores, "test_no_limit": free}


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    best, limited, free, memory = result["best"], result["test"], result["test_no_limit"], result["memory"]
    lines = [
        f"\n{result['name']}, test; beam {result['beam']}, length penalty {result['length_penalty']:g}",
        f"weights of step {best['step']}, whose validation BLEU is best: {best['bleu']:.2f}",
    ]
    for how, scores in {"without a limit": free, "under the limit": limited}.items():
        if how == "under the limit" or free != limited:
            served = ", ".join(f"{layer['served']:.2f}" for layer in scores["layers"])
            kept = f"; rows kept per token: {served}" if served else ""
            lines.append(f"{how}: {describe_scores(scores)}{kept}")
    for name, pair in limited["pairs"].items():
        lines.append(f"  {name:12} {describe_scores(pair)}")
    if memory:
        lines.append(f"the translations of the most similar training texts: {describe_scores(memory)}")
    lines.append(f"BLEU {pair['bleu_signature']}\nchrF2++ {pair['chrf_signature']}\n")
    for name, source, reference, ours in free["examples"]:
        lines.append(f"{name}: {source}\n  reference: {reference}\n  ours:      {ours}")
    return "\n".join(lines)


def translate_file(config: Config, context, at_once: int = 1000):
    """Prints the translation of every line of a file; of an empty line an empty one.

    at_once: how many lines are read before their translations are printed. The weights are the best of a finished run,
    or the last of one that is not finished.
    """
    with clear_errors():
        read = {"model", "beam", "length_penalty", "micro_tokens", "device", "dtype"}
        refuse_others(config, PRESETS, "translate", read)
        model, tokenizer = pretrained.load(config.model)
        if not isinstance(model, Translator):
            raise ValueError(f"{config.model} is no translator: give --model the folder of a run of train_mt.py")
        model = context.place(model)
        source = iter([])
        if context.rank == 0:  # a pipe can be read once
            stdin = config.translate == "-"
            lines = open(0, encoding="utf-8-sig", newline="\n") if stdin else read_lines(Path(config.translate))
            source = map(str.strip, lines)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough, such as head, ends this quietly
    watches = list(map(measures.RoutingStats, model.moe_layers))
    while True:
        with clear_errors():
            lines = list(islice(source, at_once))
        lines = context.gather(lines)[0]
        if not lines:
            break
        translations = translate_texts(model, lines, tokenizer, config, context)
        if context.rank == 0:
            print("".join(f"{line}\n" for line in translations), end="", flush=True)
    served = [watch.finish(context.sum)["served"] for watch in watches]
    if served and context.rank == 0:
        words = ", ".join(f"{name} {rows:.1f}" for name, rows in zip(model.moe_names, served))
        print(f"experts served per token: {words}", file=sys.stderr)


def main():
    config, context = start(Config, PRESETS)
    if config.translate is not None:
        translate_file(config, context)
        return
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
