"""XMoE's and X-MoE's translation models: an encoder-decoder with sparse experts under any router.

    python train_mt.py                                         the demo: five languages to English, some 800 texts each
    torchrun train_mt.py --router switch                       another router, with equal parameters and FLOPs
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

import re
import sys
from collections import ChainMap
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal

import torch
from torch import Tensor
from tqdm import tqdm

import common
import measures
import parallel
import pretrained
import runs
from data import counting
from data.batches import Translation, TranslationData, source_batches
from data.files import read_lines
from data.tokenizers import XLMR
from model import ModelConfig, sizes
from translator import Translator

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config(ModelConfig):
    preset: str = "demo"  # demo, multi30k, wmt23 (XMoE) or wmt10 (X-MoE)
    table: int | None = None  # run every row of XMoE's table 3 or X-MoE's table 4 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs-en"  # a corpus of translation pairs under data/prepared, or the folder of a prepared one
    target: str = "en"  # the language to translate into, from the other of each pair
    sampling_exponent: float = 1.0  # a pair of languages is drawn in proportion to its size to this power
    block_size: int = 128  # longest source and longest translation in training; longer pairs are left out
    n_layer: int = 4  # blocks of the encoder
    decoder_layers: int = 2  # blocks of the decoder
    n_embd: int = 128  # D
    ffn_size: int = 512  # inner width of a dense FFN
    dropout: float = 0.3  # after embeddings, attention and FFN
    init_std: float = 0.04  # of the normal that weights start from
    expert_ffns: int = 8  # a sparse layer has as many parameters as so many FFNs; the paper: 32
    seed: int = 0  # of weights, data order and dropout
    steps: int = 1500  # optimizer steps
    batch_tokens: int = 2048  # tokens of a step, both sides with their padding, over all processes and micro-batches
    micro_tokens: int = 2048  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 2e-3  # peak
    router_lr: float = 1.0  # routers learn at so many times the rate of the rest
    warmup_steps: int = 512  # steps to the peak; then it falls as 1 / sqrt(step)
    beta1: float = 0.9  # Adam
    beta2: float = 0.98  # Adam
    eps: float = 1e-8  # Adam
    weight_decay: float = 1e-4  # of matrices and embeddings
    grad_clip: float = 0.0  # largest norm of the gradient; 0 for no limit
    label_smoothing: float = 0.1  # share of the target that is spread over the vocabulary
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    beam: int = 5  # beams of a translation
    length_penalty: float = 1.0  # a translation's log probability is divided by its length to this power
    eval_every: int = 300  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 20  # validation tokens of each loss, at most
    eval_sentences: int = 3000  # validation sentences of each BLEU, at most, from every pair of languages
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_mt"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    expert_parallel: int = 1  # processes that share out the experts of one model, see parallel.py
    shard: bool = False  # weights and their state lie in pieces over all processes (FSDP2)
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    translate: str | None = None  # no training: translate this file, or - for standard input, with a trained model
    model: str = "out/train_mt/demo"  # the folder of its run

    frequency_bias: ClassVar = False  # these two are not of a translator
    relative_bias: ClassVar = False
    not_identity: ClassVar = {"translate", "model"}

    def unread(self) -> set[str]:
        return super().unread() | ({"model"} if self.translate is None else set())  # whose weights to translate with


# XMoE 4.2 and its authors' configurations; the papers are silent on batch and steps: those are ours.
PAPER = dict(n_layer=12, decoder_layers=6, n_embd=512, ffn_size=2048, n_head=8, block_size=256, expert_ffns=32)
PAPER |= dict(learning_rate=5e-4, warmup_steps=512, batch_tokens=1 << 18, micro_tokens=1 << 14, steps=50_000)
PAPER |= dict(eval_every=2_500, log_every=50)
PRESETS = {
    "demo": {},
    "multi30k": dict(data="multi30k-de", eval_every=500),  # German captions to English: 8 minutes on one core
    "wmt23": PAPER | dict(data="wmt23-de"),
    "wmt10": PAPER | dict(data="wmt10", sampling_exponent=0.7, router="hypersphere", moe_after=(6,)),
}

AVERAGED = 5  # evaluations, whose mean weights are scored beside the best ones, never in their place

# Rows of XMoE's table 3: what to change, and the paper's BLEU and chrF2++. `split` is the number of experts that an
# FFN's width is divided into: 32 x 2048, 64 x 1024, 128 x 512.
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


def table3(base: Config) -> runs.Table:
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
            size = base.ffn_size // split
            experts = f"{base.expert_ffns * split} x {size}"
            if size != sizes(replace(base, router=router)).expert_size:
                change["expert_size"] = size
        for language, data in corpora.items():
            numbers = paper.split(" | ")[LANGUAGES.index(language)]
            rows.append(((method, experts, language, numbers), change | {"data": data}))
    title = "XMoE table 3: test BLEU and chrF2++ of every router at equal FLOPs"
    return runs.Table(title, ("method", "experts", "language", "paper"), rows)


def table4(base: Config) -> runs.Table:
    """X-MoE's layer half-way in the encoder, many languages to English."""
    depth = base.moe_after or (max(1, base.n_layer // 2),)
    rows = [((method,), {"router": router, "moe_after": depth}) for method, router in TABLE4]
    return runs.Table("X-MoE table 4: test BLEU and chrF2++ of many languages to English", ("method",), rows)


def cells(result: dict) -> dict:
    """A row of either table; `rows kept`: per token, the mean over MoE layers."""
    found = {"params, M": (result["parameters"]["total"] / 1e6, ".1f")}
    for where, note in {"test": "", "test_no_limit": ", no limit"}.items():
        scores = result[where]
        served = [layer["served"] for layer in scores["layers"]]
        found[f"BLEU{note}"] = scores["bleu"], ".2f"
        found[f"chrF2++{note}"] = scores["chrf"], ".2f"
        found[f"rows kept{note}"] = fmean(served) if served else None, ".2f"
    found["BLEU, memory"] = result["memory"].get("bleu"), ".2f"
    found |= {"BLEU, valid": (result["best"]["bleu"], ".2f"), "averaged, valid": (result["averaged"]["valid"], ".2f")}
    found["averaged, test"] = result["averaged"]["test"], ".2f"
    pairs = result["test"]["pairs"]
    if 1 < len(pairs) <= 10:  # more are no table
        found |= {name: (pair["bleu"], ".2f") for name, pair in pairs.items()}
    return found


TABLES = {3: table3, 4: table4}

# ---------------------------------------------------------------------------------------------------------------------
# Translating and scoring


def translate_texts(model: Translator, texts: list[str], tokenizer: XLMR, config: Config, context, limit=False) -> list:
    """The translation of each text, detokenised, on one line. Batches of like lengths are dealt to the processes.

    limit: under the evaluation's capacity, where a translation depends on its batch too. A text of more than
    block_size - 1 tokens is cut, and a line says so; one without any is its own translation, which is empty.
    """
    ids, room = tokenizer.encode_batch(texts), model.config.block_size - 1
    long = sum(len(text) > room for text in ids)
    if long:
        common.warn(f"{long} of {len(ids)} texts are cut to block_size - 1 = {room} tokens")
    written = [number for number, text in enumerate(ids) if text]
    sources = [ids[number][:room] for number in written]
    budget = config.micro_tokens // 2  # about as many source tokens as in training, which a capacity counts
    batches = list(source_batches(sources, tokenizer.pad, tokenizer.eos, budget))[context.rank :: context.world]
    options = dict(beam=config.beam, length_penalty=config.length_penalty, limit=limit)
    options |= dict(bos=tokenizer.bos, eos=tokenizer.eos, never=tokenizer.unwritten)
    found = {}  # number of a text -> its translation
    for numbers, batch in tqdm(batches, desc="translating", unit="batch", leave=False, disable=context.rank > 0):
        source, real = context.send_all(*batch)
        with context.autocast():
            best = model.translate(source, real, **options)
        for number, translation in zip(numbers, best):
            text = tokenizer.decode(translation)
            found[written[number]] = " ".join(text.split())  # a piece may be a line feed
    found = ChainMap(*context.gather(found))
    return [found.get(number, "") for number in range(len(texts))]


def score(translations: list[str], references: list[str], language: str) -> dict[str, float | str]:
    """BLEU and chrF2++ of a corpus, both texts as people write them: sacrebleu splits that language's words itself."""
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
    """Scores of every pair of languages, of `most` sentences each, their means, five examples, routing statistics."""
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
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
    """BLEU and chrF2++ of a translation memory on the test set, in the mean over pairs of languages.

    {} where the training text is large.
    """
    found = []
    for name in data.languages:
        remembered = counting.remembered(data, name)
        if remembered:
            found.append(score(remembered, data.texts("test", name)[1], data.target))
    return {metric: fmean(scores[metric] for scores in found) for metric in ("bleu", "chrf")} if found else {}


@torch.no_grad()
def evaluate(model: Translator, data: TranslationData, split: str, context, max_tokens: int) -> dict:
    """What the model gives the right translations (without smoothing), balance loss and routing statistics."""
    model.eval()
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    sums = torch.zeros(3, dtype=torch.float64)  # cross entropy, balance loss, tokens
    for batch in data.eval_batches(split, max_tokens, context.rank, context.world):
        batch = Translation(*context.send_all(*batch))
        with context.autocast():
            logits, balance = model(batch.source, batch.target, batch.source_real, batch.target_real)
            loss = common.cross_entropy(logits, batch.labels)
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


def describe_memory(scores: dict[str, float]) -> str:
    if not scores:
        return "a translation memory: not tried, the training text is large"
    reached = f"BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f} of the test text"
    return f"a translation memory, which gives the translation of the most similar training text, has {reached}"


def describe(scores: dict) -> str:
    """What one evaluation found, a line an MoE layer."""
    line = f"{scores['bpb']:.3f} bits per byte, perplexity {scores['ppl']:.2f}"
    line += f"  BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}"
    lines = [line + (f"  balance {scores['balance']:.3f}" if scores["layers"] else "")]
    lines += [f"  {layer['name']}: {measures.describe_routing(layer)}" for layer in scores["layers"]]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Trains (or goes on training) a translator -> its result, which is also in result.json."""
    with common.clear_errors():
        how = {"exponent": config.sampling_exponent, "target": config.target}
        data = TranslationData.open(config.data, config, context, **how)
        run = runs.Run(config, PRESETS, context, data)
        if run.result:
            return run.result
        score([""], [""], config.target)  # is sacrebleu there?
        common.seed_all(config.seed)
        model = common.place(Translator(runs.with_vocabulary(config, data)), context)
    best, last = None, []  # step, validation BLEU and weights; weights of the last evaluations
    if run.checkpoint:
        best, last = run.checkpoint["best"], run.checkpoint["last"]
        model.load_state_dict(run.checkpoint["model"])
    counts = data.meta["splits"]["train"]
    length = counts["tokens"] / counts["pairs"] / 2
    parameters, flops = measures.count_parameters(model), measures.translation_flops(model, length, length)
    run.say(
        f"{run.name}: {parameters['total']:,} parameters, {parameters['active']:,.0f} active a token; a pair of "
        f"2 x {length:.1f} tokens takes {flops['total'] / 1e6:.1f} MFLOPs forward, {flops['moe'] / 1e6:.1f} of them in "
        f"MoE layers; {counts['pairs']:,} pairs of {', '.join(data.languages)}"
    )
    memory = score_memory(data)
    run.say(describe_memory(memory))
    if any(data.left_out.values()):
        long = ", ".join(f"{count:,} {split}" for split, count in data.left_out.items())
        run.say(f"left out of training and of the loss, longer than block_size = {config.block_size}: {long} pairs")
    parallel.split(model, config, context)
    optimizer = common.adamw(model, config)
    forward = run.begin(model, optimizer, flops["total"] / (2 * length), state=lambda: {"best": best, "last": last})
    for step in run.steps():
        common.set_learning_rate(optimizer, common.inverse_sqrt(step, config.warmup_steps, config.learning_rate))
        for micro in run.micros(step):
            batch = Translation(*context.send_all(*data.batch("train", step, micro)))
            with context.autocast():
                logits, balance = forward(batch.source, batch.target, batch.source_real, batch.target_real)
                loss = common.cross_entropy(logits, batch.labels, label_smoothing=config.label_smoothing)
            run.backward(loss + config.balance_coef * balance, shown=loss, tokens=batch.tokens)
        run.update()
        model.after_step()
        if run.end_step(step):
            now = run.whole()
            scores = evaluate(now, data, "valid", context, config.eval_tokens)
            run.check_finite(scores["loss"], step + 1)  # broken weights translate nothing
            valid = score_split(now, data, "valid", config, context, config.eval_sentences)
            weights = {name: x.cpu().clone() for name, x in now.state_dict().items()}
            last = [*last, weights][-AVERAGED:]
            if best is None or valid["bleu"] > best["bleu"]:
                best = {"step": step + 1, "bleu": valid["bleu"], "model": weights}
            scores |= {"bleu": valid["bleu"], "chrf": valid["chrf"]}
            run.save(step, scores, scores["loss"], f"valid {describe(scores)}")
    model = run.model = run.whole()
    model.load_state_dict(mean_of(last))
    averaged = {"valid": score_split(model, data, "valid", config, context, config.eval_sentences)["bleu"]}
    averaged["test"] = score_split(model, data, "test", config, context)["bleu"]
    model.load_state_dict(best.pop("model"))
    run.save_model("model.pt", best["step"])
    search = {"beam": config.beam, "length_penalty": config.length_penalty}
    scores = test(model, data, config, context)
    scores |= {"memory": memory, "best": best, "averaged": averaged, "parameters": parameters, "flops_per_pair": flops}
    return run.finish(search | scores)


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several weights, and of a hash, whose whole numbers are the same in all."""
    mean = {}
    for name in states[0]:
        mean[name] = sum(state[name] for state in states) / len(states)
    return mean


def test(model: Translator, data: TranslationData, config: Config, context) -> dict:
    """Scores of the test set at the evaluation gamma (the paper's protocol), and without a limit."""
    scores = free = score_split(model, data, "test", config, context)
    if model.limited_at_test:
        free = score_split(model, data, "test", config, context, limit=False)
    return {"test": scores, "test_no_limit": free}


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    best, shown = result["best"], {"under the limit": result["test"]}
    if result["test_no_limit"] != result["test"]:
        shown["without a limit"] = result["test_no_limit"]
    lines = [f"\n{result['name']}, test; beam {result['beam']}, length penalty {result['length_penalty']:g}"]
    lines += [f"weights of step {best['step']}, whose validation BLEU is best: {best['bleu']:.2f}"]
    averaged = result["averaged"]
    lines += [
        f"the mean of the last {AVERAGED} weights, for comparison: {averaged['valid']:.2f}, test {averaged['test']:.2f}"
    ]
    for how, scores in shown.items():
        served = ", ".join(f"{layer['served']:.2f}" for layer in scores["layers"])
        kept = f"; rows kept per token: {served}" if served else ""
        lines += [f"{how}: BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}{kept}"]
        for name, pair in scores["pairs"].items():
            lines += [f"  {name:12} BLEU {pair['bleu']:6.2f}  chrF2++ {pair['chrf']:6.2f}"]
    lines += [describe_memory(result["memory"])]
    any_pair = next(iter(result["test"]["pairs"].values()))
    lines += [f"BLEU {any_pair['bleu_signature']}", f"chrF2++ {any_pair['chrf_signature']}", ""]
    for name, source, reference, ours in scores["examples"]:
        lines += [f"{name}: {source}", f"  reference: {reference}", f"  ours:      {ours}"]
    return "\n".join(lines)


def translate_file(config: Config, context, at_once: int = 1000):
    """Prints the translation of every line of a file, an empty one for one without text.

    So many are read and printed at once. The weights are a finished run's best, or the last of one that goes on.
    """
    with common.clear_errors():
        runs.refuse_others(config, PRESETS, "translate", "model beam length_penalty micro_tokens device dtype")
        model, tokenizer = pretrained.load(config.model)
        if not isinstance(model, Translator):
            raise ValueError(f"{config.model} is no translator: give --model the folder of a run of train_mt.py")
        model = common.place(model, context)
        path = Path("/dev/stdin" if config.translate == "-" else config.translate)
        source = map(str.strip, read_lines(path) if context.rank == 0 else [])  # a pipe is read once
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    while True:
        with common.clear_errors():
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
    config, context = runs.start(Config, PRESETS)
    if config.translate is not None:
        translate_file(config, context)
        return
    runs.carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
