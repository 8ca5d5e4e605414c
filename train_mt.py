"""XMoE's and X-MoE's translation models: an encoder-decoder with sparse experts under any router.

    python train_mt.py                                         the demo: three ciphers to readable English
    python train_mt.py --router switch                         another router, with equal parameters and FLOPs
    python -m data.prepare multi30k-de --source DIR            then
    python train_mt.py --preset multi30k                       German captions to English
    torchrun --nproc_per_node 4 train_mt.py --preset wmt23 --data wmt23-uk       the paper's model, on 4 GPUs
    python train_mt.py --table 3                               every row of a table, beside the paper's numbers
    python train_mt.py --translate FILE --model out/train_mt/multi30k      a trained model, line by line

Prints, at every evaluation, cross entropy, how each MoE layer routes, and BLEU and chrF2++ of the validation set; in
the end those of the test set, by the weights of the best validation BLEU, under the evaluation's capacity limit (the
paper's protocol) and without one. Beside them stand those of a translation memory and of a lookup of single tokens, and
the *moment*, the first evaluation that is ahead of the memory. A run is kept in out/train_mt/NAME; the same command
goes on where it stopped. `--help` lists every constant.
"""

import math
import sys
from collections import ChainMap
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch
from tqdm import tqdm

from analysis import flops, measures
from data.batches import TranslationData, source_batches
from data.files import read_lines
from data.scores import mean, score_counting, score_translations
from data.tokenizers import XLMR
from engine import parallel, pretrained
from engine.device import clear_errors, seed_all, warn
from engine.optim import adamw, clip_gradients, inverse_sqrt, set_learning_rate
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
    data: str = "ciphers-mt"  # a folder of de-en.de and .en, a corpus of pairs in data/prepared, or a prepared folder
    target: str = "en"  # the language to translate into, from the other of each pair
    sampling_exponent: float = 1.0  # a pair of languages is drawn in proportion to its size to this power
    seed: int = 0  # of weights, data order and dropout
    # the model
    n_layer: int = 4  # blocks of the encoder
    decoder_layers: int = 2  # blocks of the decoder
    n_head: int = 4  # H
    n_embd: int = 64  # D
    ffn_size: int = 256  # inner width of a dense FFN
    block_size: int = 32  # longest source and longest translation in training; longer pairs are left out
    dropout: float = 0.0  # after embeddings, attention and FFN
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
    moe_after: tuple[int, ...] = ()  # X-MoE: sparse layers stand after these layers of the encoder, from 1
    experts: int = 32  # X-MoE: E
    expert_size: int = 256  # X-MoE: F
    expert_layers: int = 3  # X-MoE: FFNs of an expert, each with a norm and a residual around it
    capacity_factor: float = math.inf  # X-MoE: gamma; inf: no limit
    top_k: int | None = None  # K, experts per token of topk; None: XMoE's `split`, X-MoE's 1
    threshold: float = 0.3  # t, the probability that the chosen experts must reach together; the paper: 0.9
    eval_threshold: float | None = None  # at test; None: the same
    routing_dim: int | None = None  # d_e, what the router projects to; 0: nothing; None: on a hypersphere E / 2
    init_temperature: float | None = None  # tau_0 of a hypersphere; None: the gate's
    router_std: float = 0.04  # of the normal that a router's weights start from
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    # training
    steps: int = 2000  # optimizer steps
    batch_tokens: int = 2048  # tokens of a step, both sides with their padding, over all processes and micro-batches
    micro_tokens: int = 2048  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 4e-3  # peak
    warmup_steps: int = 200  # steps to the peak; then it falls as 1 / sqrt(step)
    beta2: float = 0.98  # Adam
    eps: float = 1e-8  # Adam
    weight_decay: float = 1e-4  # of matrices and embeddings
    grad_clip: float = 0.0  # largest norm of the gradient; 0 for no limit
    label_smoothing: float = 0.1  # share of the target that is spread over the vocabulary
    eval_every: int = 250  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 20  # validation tokens of each loss, at most
    eval_sentences: int = 100  # validation sentences of each BLEU, at most, from every pair of languages
    log_every: int = 10  # steps from one look at the loss to the next
    # translating
    beam: int = 5  # beams of a translation
    length_penalty: float = 1.0  # a translation's log probability is divided by its length to this power
    translate: str | None = None  # no training: translate the lines of this file with a trained model
    model: str = "out/train_mt/demo"  # the folder of its run
    # where and how
    out_dir: str = "out/train_mt"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # torch.compile; None: where products are in bfloat16 on a GPU
    recompute: bool = False  # activation checkpointing: less memory, for a second forward pass
    resume: bool = True  # go on from the run's newest checkpoint; false: start again

    def unread(self) -> set[str]:
        """Constants that a run does not read because of others."""
        if self.translate is not None:
            read = {"translate", "model", "beam", "length_penalty", "micro_tokens", "device", "dtype"}
            return vars(self).keys() - read
        names = {"model"}
        if self.moe_after:
            return names | {"moe_every", "decoder_moe", "expert_ffns", "split", "capacity", "eval_capacity"}
        return names | {"experts", "expert_size", "expert_layers", "capacity_factor"}


# What real text needs: it is long, and a model can learn it by heart.
REAL = dict(dropout=0.3, threshold=0.9, expert_size=512, warmup_steps=512, eval_sentences=3000, dtype="auto")
MULTI30K = REAL | dict(data="multi30k-de", n_embd=128, ffn_size=512)  # German captions: 8 minutes on one core
MULTI30K |= dict(block_size=128, learning_rate=2e-3, steps=1500, eval_every=500)
# XMoE 4.2 and its authors' configurations; the papers are silent on batch and steps: those are ours.
PAPER = REAL | dict(n_layer=12, decoder_layers=6)
PAPER |= dict(n_head=8, n_embd=512, ffn_size=2048)
PAPER |= dict(block_size=256, learning_rate=5e-4)
PAPER |= dict(batch_tokens=1 << 18, micro_tokens=1 << 14)
PAPER |= dict(steps=50_000, eval_every=2_500, log_every=50)
X_MOE = dict(router="hypersphere", moe_after=(6,), expert_size=2048)
PRESETS = {
    "demo": {},
    "multi30k": MULTI30K,
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
# X-MoE's table 4: method, what to change. Our copy of the paper lacks its numbers.
TABLE4 = {
    "dense": dict(router="dense"),
    "one expert for all": dict(router="switch", experts=1),  # ours: as much work a token as the next two
    "SMoE": dict(router="switch"),
    "X-MoE": dict(router="hypersphere"),
}


def table3(base: Config) -> Table:
    """Every router, with the same parameters and FLOPs of its experts; at the paper's scale a model a language."""
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
            labels = method, experts, language, numbers
            rows.append((labels, change | {"data": data}))
    title = "XMoE table 3: test BLEU and chrF2++ of every router at equal FLOPs"
    return Table(title, ("method", "experts", "language", "paper"), rows)


def table4(base: Config) -> Table:
    """X-MoE's layer half-way in the encoder, many languages to English."""
    depth = base.moe_after or (max(1, base.n_layer // 2),)
    rows = []
    for method, change in TABLE4.items():
        rows.append(((method,), change | {"moe_after": depth}))
    return Table("X-MoE table 4: test BLEU and chrF2++ of many languages to English", ("method",), rows)


def cells(result: dict) -> dict:
    """A row of either table; `rows kept`: per token, the mean over MoE layers."""
    found = {"params, M": (result["parameters"]["total"] / 1e6, ".1f")}
    for where, note in {"test": "", "test_no_limit": ", no limit"}.items():
        scores = result[where]
        found[f"BLEU{note}"] = scores["bleu"], ".2f"
        found[f"chrF2++{note}"] = scores["chrf"], ".2f"
        found[f"rows kept{note}"] = measures.mean_over_layers("served", scores["layers"]), ".2f"
    for what in ("memory", "lookup"):
        for metric, column in {"bleu": "BLEU", "chrf": "chrF2++"}.items():
            found[f"{column}, {what}"] = result.get(what, {}).get(metric), ".2f"
    found["BLEU, valid"] = result["best"]["bleu"], ".2f"
    moments = result.get("moment", {}).values()
    found["ahead at step"] = max(moments) if moments and all(moments) else None, ",.0f"  # of every memory
    pairs = result["test"]["pairs"]
    if 1 < len(pairs) <= 10:  # more columns would not fit
        for name, pair in pairs.items():
            found[name] = pair["bleu"], ".2f"
            found[f"{name}, chrF2++"] = pair["chrf"], ".2f"
    return found


TABLES = {3: table3, 4: table4}

# ---------------------------------------------------------------------------------------------------------------------
# Translating and scoring


@torch.no_grad()
def translate(model: Translator, source, real, tokenizer, beam=5, length_penalty=1.0, limit=False) -> list:
    """Translates by beam search: for each of B sources the ids of the best translation, without <s> and </s>.

    source (B, N) ends in </s>; real (S,): see `Translator.encode`. Of a source of n tokens before </s> the translation
    has at most 1.2 n + 10. A finished one is worth its log probability over its length, with </s>, to the power of
    `length_penalty`; a sentence is done when K are finished, or when its beams are as long as they may be. Experts have
    no capacity limit, so that a translation depends on its source alone; with `limit` they have the evaluation's. Keys
    and values of what is written are kept, so that each step reads one token.
    """
    K, V, (B, N) = beam, model.vocab_size, source.shape
    device = source.device
    never = torch.tensor(tokenizer.unwritten, device=device)  # no text is made of these
    is_end = torch.arange(V, device=device) == tokenizer.eos
    length = source.new_full((B,), N)  # with </s>
    if real is not None:
        length = real_mask(source, real).sum(dim=1)
    longest = 6 * (length - 1) // 5 + 10
    written = source.new_full((B, K, 1), tokenizer.bos)  # the tokens of each beam
    score = torch.zeros(B, K, device=device)
    score[:, 1:] = -math.inf  # at first all beams are alike, and only one goes on
    finished = [[] for _ in range(B)]  # of each sentence pairs of a value and the ids
    searched = list(range(B))  # the b sentences that are not done
    was_training = model.training
    model.eval()
    with nullcontext() if limit else model.no_limit():
        encoded, _ = model.encode(source, real)
        past = None
        while searched:
            t = written.shape[2]  # tokens, with </s>, of a translation that ends now
            h, _, past = model.decode(written[:, :, -1:].flatten(0, 1), encoded, past)
            log_probs = model.log_probabilities(h[:, -1])  # (b * K, V)
            log_probs[:, never] = -math.inf
            total = log_probs.unflatten(0, (-1, K))  # (b, K, V)
            total += score.unsqueeze(2)
            must_end = (longest < t).tolist()
            for i, last in enumerate(must_end):
                if last:
                    total[i] = total[i].where(is_end, -math.inf)
            best, place = total.flatten(1).topk(2 * K)  # (b, 2 K), the best first
            before, token = place // V, place % V
            ends = token == tokenizer.eos
            ended = ends & (best > -math.inf)
            for i, j in ended[:, :K].nonzero().tolist():
                value = float(best[i, j]) / t**length_penalty
                ids = written[i, before[i, j], 1:].tolist()
                finished[searched[i]].append((value, ids))
            # Of the 2 K best continuations of a sentence at most K are ends, one of each beam, so K go on.
            going_on = ends.int().argsort(dim=1, stable=True)[:, :K]
            score = best.gather(1, going_on)
            before = before.gather(1, going_on)
            token = token.gather(1, going_on)
            written = written.take_along_dim(before.unsqueeze(2), dim=1)
            written = torch.cat([written, token.unsqueeze(2)], dim=2)
            full = [len(finished[own]) >= K for own in searched]
            stay = [i for i in range(len(searched)) if not (must_end[i] or full[i])]
            rows = before + K * torch.arange(len(searched), device=device).unsqueeze(1)
            past = rows_of(past, rows[stay].flatten())
            if len(stay) < len(searched):
                encoded = encoded.sentences(stay)
                written, score = written[stay], score[stay]
                longest = longest[stay]
                searched = [searched[i] for i in stay]
    model.train(was_training)
    return [max(pairs)[1] for pairs in finished]


def translate_texts(model: Translator, texts: list[str], tokenizer: XLMR, config, context, limit=False) -> list[str]:
    """The translation of each text, as people write it, in one line; empty where a text has no tokens.

    limit: see `translate`. Processes share out batches of like lengths.
    """
    ids, room = tokenizer.encode_batch(texts), model.config.block_size - 1
    long = sum(len(text) > room for text in ids)
    if long:
        warn(f"{long} of {len(ids)} texts are cut to block_size - 1 = {room} tokens")
    written = [number for number, text in enumerate(ids) if text]
    sources = [ids[number][:room] for number in written]
    budget = config.micro_tokens // 2  # about as many source tokens as in training, which a capacity counts
    batches = [*source_batches(sources, tokenizer.pad, tokenizer.eos, budget)]
    silent = context.rank > 0 or None
    found = {}  # number of a text -> its translation
    for numbers, batch in tqdm(batches[context.rank :: context.world], "translating", leave=False, disable=silent):
        source, real = context.send_all(*batch)
        with context.autocast():
            best = translate(model, source, real, tokenizer, config.beam, config.length_penalty, limit)
        for number, translation in zip(numbers, best):
            text = tokenizer.decode(translation)
            found[written[number]] = " ".join(text.split())  # a piece may be a line feed
    found = ChainMap(*context.gather(found))
    return [found.get(number, "") for number in range(len(texts))]


def score_split(model, data: TranslationData, split: str, config: Config, context, most=None, limit=True) -> dict:
    """Translates at most so many sentences of each pair of languages (None: all) -> scores, examples, routing.

    limit: as `translate` has it.
    """
    watches = list(map(measures.RoutingStats, model.moe_layers))
    pairs, texts = {}, []
    for name in data.languages:
        sources, references = (side[:most] for side in data.texts(split, name))
        if sources:
            ours = translate_texts(model, sources, data.tokenizer, config, context, limit)
            pairs[name] = score_translations(ours, references, config.target)
            texts += [(name, *own) for own in zip(sources, references, ours)]
    apart = max(1, len(texts) // 5)
    return mean(pairs.values()) | {
        "pairs": pairs,
        "sentences": len(texts),
        "examples": texts[apart // 2 :: apart][:5],
        "layers": [watch.finish(context.sum) for watch in watches],
    }


@torch.no_grad()
def evaluate(model: Translator, data: TranslationData, split: str, context, max_tokens: int) -> dict:
    """Cross entropy of the right translations (not smoothed), balance loss and routing statistics."""
    model.eval()
    watches = list(map(measures.RoutingStats, model.moe_layers))
    sums = torch.zeros(3, dtype=torch.float64)  # cross entropy, balance loss, tokens
    for number, batch in enumerate(data.eval_batches(split, max_tokens, context.rank, context.world)):
        seed_all(model.config.seed, 0, 1 + context.rank + number * context.world)  # for a router that draws
        with context.autocast():
            loss, balance = model(*context.send_all(*batch))
        sums += torch.tensor([float(loss), float(balance), 1.0], dtype=torch.float64) * len(batch.labels)
    loss, balance, tokens = context.sum(sums).tolist()
    model.train()
    return {
        "loss": loss / tokens,
        "ppl": measures.perplexity(loss / tokens),
        "bpb": measures.bits_per_byte(loss / tokens, data.eval_counts(split, max_tokens)),
        "balance": balance / tokens,
        "tokens": int(tokens),
        "layers": [{"name": name} | watch.finish(context.sum) for name, watch in zip(model.moe_names, watches)],
    }


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
        score_translations([""], [""], config.target)  # is all there that this language needs?
        seed_all(config.seed)
        model = context.place(Translator(config, data.vocab_size))
        counts = data.meta["splits"]["train"]
        length = counts["tokens"] / counts["pairs"] / 2
        parameters = flops.count_parameters(model)
        work = flops.translation_flops(model, length, length)
        size = "{total:,} parameters, {active:,.0f} active a token".format(**parameters)
        context.say(f"{run.name}: {size}; {work / 1e6:.1f} MFLOPs forward a pair of 2 x {length:.1f} tokens")
        left_out = ", ".join(f"{count:,} {split}" for split, count in data.left_out.items())
        context.say(f"{counts['pairs']:,} pairs; longer than block_size, and left out: {left_out}")
        counting = score_counting(data)
        memories = {name: pair["chrf"] for name, pair in counting["memory"].get("pairs", {}).items()}
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        run.resume(model, optimizer, work / (2 * length), "smoothed loss {:.4f}".format)

    for step in run.steps():
        set_learning_rate(optimizer, inverse_sqrt(step, config.warmup_steps, config.learning_rate))
        batches = [data.batch("train", step, micro) for micro in run.micros]
        predicted = context.mean(sum(len(batch.labels) for batch in batches)) or 1.0
        for micro, batch in zip(run.micros, batches):
            seed_all(config.seed, 1 + step, micro)  # all that is random: so a resumed run is the same run
            forward.require_backward_grad_sync = micro == run.micros[-1]  # DDP exchanges gradients once
            with context.autocast():
                loss, balance = forward(*context.send_all(*batch))
            total = loss + config.balance_coef * balance
            share = len(batch.labels) / predicted  # a step's loss is the mean over all tokens that it predicts
            (share * total).backward()
            run.add(share * loss, tokens=batch.tokens)
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()  # restores what a router keeps fixed: a hypersphere its norms, the others nothing
        if run.due(step + 1):
            scores = evaluate(model, data, "valid", context, config.eval_tokens)
            run.check_finite(scores["loss"], step + 1)  # broken weights translate nothing
            valid = score_split(model, data, "valid", config, context, config.eval_sentences)
            best, found = run.kept.get("best", {}), {name: valid[name] for name in ("bleu", "chrf")}
            if tuple(found.values()) > (best.get("bleu", -1), best.get("chrf", 0)):
                weights = {name: x.to("cpu", copy=True) for name, x in model.state_dict().items()}
                run.kept["best"] = found | {"step": step + 1, "model": weights}
            moments = run.kept.setdefault("moment", {})
            for name, pair in valid["pairs"].items():
                if pair["chrf"] > memories.get(name, math.inf):  # the memory's of the test set
                    moments.setdefault(name, step + 1)
            scores |= found
            run.save(step + 1, scores, f"valid {describe(scores)}", scores["loss"])

    result = test(model, data, run, config, context) | counting
    result["moment"] = {name: run.kept["moment"].get(name) for name in memories}
    return run.finish(result | {"parameters": parameters, "flops_per_pair": work})


def test(model: Translator, data: TranslationData, run: Run, config: Config, context) -> dict:
    """Test scores with the weights of the best validation BLEU, which are saved as model.pt."""
    best = run.kept["best"]
    model.load_state_dict(best["model"])
    run.save_model("model.pt", model, best["step"])
    scores = free = score_split(model, data, "test", config, context)  # under the limit: the paper's protocol
    if model.limited_at_test:
        free = score_split(model, data, "test", config, context, limit=False)
    return {"test": scores, "test_no_limit": free, "best": {"step": best["step"], "bleu": best["bleu"]}}


def in_words(scores: dict) -> str:
    return "BLEU {bleu:.2f}  chrF2++ {chrf:.2f}".format(**scores)


def describe(scores: dict) -> str:
    """What one evaluation found, a line an MoE layer."""
    text = "{bpb:.3f} bits per byte, perplexity {ppl:.2f}  balance {balance:.3f}  ".format(**scores) + in_words(scores)
    for layer in scores["layers"]:
        text += f"\n  {layer['name']}: {measures.describe_routing(layer)}"
    return text


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    scores, free = result["test"], result["test_no_limit"]
    best = result["best"]
    lines = [f"\n{result['name']}, test; beam {config.beam}, length penalty {config.length_penalty:g}"]
    lines.append(f"weights of step {best['step']}, whose validation BLEU is best: {best['bleu']:.2f}")
    lines.append("under the limit: " * (free != scores) + in_words(scores))
    if free != scores:
        lines.append(f"without a limit: {in_words(free)}")
    for name, pair in scores["pairs"].items():
        lines.append(f"  {name:12} {in_words(pair)}")
        if result["memory"]:
            for what in ("memory", "lookup"):
                lines.append(f"    {what:10} {in_words(result[what]['pairs'][name])}")
            moment = result["moment"][name]
            lines.append("    ahead of the memory " + (f"since step {moment}" if moment else "at no evaluation"))
    lines.append("BLEU {bleu_signature}\nchrF2++ {chrf_signature}\n".format(**pair))  # one pair's are all pairs'
    for name, source, reference, ours in free["examples"]:
        lines.append(f"{name}: {source}\n  reference: {reference}\n  ours:      {ours}")
    return "\n".join(lines)


def translate_file(config: Config, context):
    """Prints the translation of every line of a file, of an empty line an empty one."""
    with clear_errors():
        model, tokenizer = pretrained.load(config.model)  # the best weights, or the last of a run that is not finished
        if not isinstance(model, Translator):
            raise ValueError(f"{config.model} is no translator: give --model the folder of a run of train_mt.py")
        lines = list(map(str.strip, read_lines(Path(config.translate))))
    if not sys.stdout.isatty():  # it is data, in UTF-8 whatever the locale is
        sys.stdout.reconfigure(encoding="utf-8")
    found = translate_texts(context.place(model), lines, tokenizer, config, context)
    context.say("\n".join(found))
    context.barrier()  # they leave together: see engine/table.py


def main():
    config, context = start(Config, PRESETS)
    if config.translate is not None:
        translate_file(config, context)
        return
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
