"""XLM-E's figures 1, 3 and 4, and tables 5, 6 and 7: training curves, retrieval, word alignment, transfer."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch
import tyro
from tqdm import tqdm

from analysis import measures
from analysis.shared import Drawn, Panel, all_but, but_for_seed, named, read_run, show
from data import bitext_sets
from data.bitext_sets import Aligned
from data.prepare import ready
from data.tokenizers import XLMR
from engine import pretrained
from engine.device import Context, seed_all, setup, warn
from engine.run import read_json
from model import Encoder

# ---------------------------------------------------------------------------------------------------------------------
# Figure 1


@dataclass
class Curve(Drawn):
    """XLM-E's figure 1: scores against training FLOPs. Higher at the same FLOPs is better.

    At our scale the scores are held-out translations found, and masked tokens of held-out sentences that are right. Of
    XLM-E the second is its generator's; beside it stands the share of the loss that the discriminator saves on replaced
    tokens. Give runs of train_electra.py, of either objective; by default all of the demo, finished or not.
    """


OBJECTIVES = {"rtd": "XLM-E", "mlm": "XLM"}


def curve(options: Curve):
    logs = Path("out/train_electra").glob("demo*/metrics.jsonl")
    folders = options.folders or sorted(str(log.parent) for log in logs)
    if not folders:
        raise ValueError("out/train_electra holds no run of the demo: python train_electra.py, or give folders of runs")
    read = {folder: read_run(folder, "train_electra") for folder in folders}
    configs = {folder: read[folder][0] for folder in read}
    names = named(configs, lambda config: OBJECTIVES[config["objective"]])
    records = []
    for folder, (config, evaluations) in read.items():
        layer = measures.middle_layer(config["n_layer"])
        for evaluation in evaluations:
            scores = evaluation["held_out"]
            sentences = scores["sentences"]
            record = {"run": folder, "encoder": f"{names[folder]}, seed {config['seed']}"}
            record["FLOPs"] = evaluation["flops"]
            record["translations found"] = scores["retrieval"][layer]
            record["tokens right"] = sentences["generator"]
            record["loss saved on replaced"] = sentences.get("saved")
            records.append(record)
    chance = {"chance": scores["chance"]}
    panels = [
        Panel("Held-out translations found", records, "encoder", "FLOPs", "translations found", chance),
        Panel("Masked tokens of held-out sentences right", records, "encoder", "FLOPs", "tokens right"),
        Panel("Loss saved on replaced tokens", records, "encoder", "FLOPs", "loss saved on replaced"),
    ]
    caption = f"XLM-E figure 1 at our scale: {', '.join(folders)}"
    show("curve", caption, options, records, panels, ("encoder", "FLOPs"))


# ---------------------------------------------------------------------------------------------------------------------
# What tables 5 and 6 share


@dataclass
class Encoders(Drawn):
    """Options of what compares the layers of encoders."""

    # runs of train_electra.py (its discriminator) or train_mlm.py, or XLM-R in Hugging Face's format
    folders: tyro.conf.Positional[tuple[str, ...]] = ("out/train_electra/demo", "out/train_mlm/demo")
    layer: int | None = None  # of the table (0: embeddings); none: that at 3/4 of the depth, the 9th of 12
    micro_tokens: int = 2048  # tokens of one forward pass
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where it is fast


RANDOM = ", random weights"  # behind the name of an encoder that has learned nothing


class Opened(NamedTuple):
    """An encoder to be measured."""

    run: str  # its folder
    kind: str  # the name that the run has with seed 0: the seeds of a kind share a row of the table
    encoder: Encoder
    tokenizer: XLMR
    layer: int  # of the table


def open_encoders(options: Encoders, context: Context) -> list[Opened]:
    """Every encoder, and behind the first of a kind one of its shape with random weights, which has learned nothing."""
    opened, configs = [], {}
    for folder in dict.fromkeys(map(Path, options.folders)):
        encoder, tokenizer = pretrained.load_encoder(folder)
        layer = layer_of(folder, encoder, options)
        constants = read_json(folder / "config.json")
        config, seed = all_but(constants, "seed"), constants.get("seed", 0)
        kind = but_for_seed("/".join(folder.parts[-2:]), seed)
        if configs.setdefault(kind, config) != config:  # the runs only look alike
            kind = but_for_seed(str(folder), seed)
        first = kind not in [one.kind for one in opened]
        encoder = context.place(encoder)
        opened.append(Opened(str(folder), kind, encoder, tokenizer, layer))
        if first:
            seed_all(0)
            encoder = context.place(Encoder(encoder.config, encoder.vocab_size).eval())
            opened.append(Opened("", kind + RANDOM, encoder, tokenizer, layer))
    return opened


def layer_of(folder: Path, encoder: Encoder, options: Encoders) -> int:
    L = encoder.config.n_layer
    layer = measures.middle_layer(L) if options.layer is None else options.layer
    if layer not in range(L + 1):
        raise ValueError(f"layer must be from 0 to {L} in {folder}, not {layer}")
    return layer


# ---------------------------------------------------------------------------------------------------------------------
# Table 5 and figure 3


@dataclass
class Retrieval(Encoders):
    """XLM-E's table 5 and figure 3: how often the nearest sentence in the other language is the translation.

    A sentence is the mean of its tokens' hidden states, and nearness is the cosine. Higher is better. What training
    taught is what an encoder finds beyond its shape with random weights, which knows shared words and lengths.
    """

    # folder of LASER's tatoeba.deu-eng.deu and .eng; none: held-out messages of Django, which need no download
    source: str | None = None
    most: int = 1000  # sentences of each language, at most
    # not the paper's: languages about their own means and all directions of like spread, before the cosine
    whiten: bool = False


PAPER_RETRIEVAL = {  # table 5: English to another language, and back
    "XLM-R": {"Tatoeba-14": (59.5, 57.6), "Tatoeba-36": (55.5, 53.4)},
    "InfoXLM": {"Tatoeba-14": (80.6, 77.8), "Tatoeba-36": (68.6, 67.3)},
    "XLM-E": {"Tatoeba-14": (74.4, 72.3), "Tatoeba-36": (65.0, 62.3)},
    "XLM-E - TRTD": {"Tatoeba-14": (55.8, 55.1), "Tatoeba-36": (46.4, 44.6)},
}


def retrieval(options: Retrieval):
    if options.most < 1:
        raise ValueError(f"most must be over 0, not {options.most}")
    texts, groups, what = sentences(options)
    context = setup(options.device, options.dtype)
    opened = open_encoders(options, context)
    found = find_translations(opened, texts, options, context)
    records, rows, panels = [], [], []
    for group, languages in groups.items():
        there = [language for language in languages if language in texts]
        if len(there) < len(languages):
            print(f"{group} without what {options.source} lacks: {', '.join(sorted({*languages} - {*there}))}")
        if not there:
            continue
        own = []
        for one, by_language in zip(opened, found):
            accuracy = torch.stack([by_language[language] for language in there])  # (languages, 2, L + 1)
            percents = 100 * accuracy.mean(dim=0)  # (2, L + 1)
            for layer, both in enumerate(percents.t().tolist()):
                own.append(accuracy_of(group, one.kind, *both, layer, one.run))
                if layer == one.layer:
                    rows.append(own[-1])
        chance = 100 * fmean(1 / len(texts[language]) for language in there)
        rows.append(accuracy_of(group, "chance", chance, chance))
        for name, theirs in PAPER_RETRIEVAL.items():
            if group in theirs:
                rows.append(accuracy_of(group, f"paper: {name}", *theirs[group]))
        title = f"{group}: accuracy, %, {len(there)} languages"
        panels.append(Panel(title, own, "encoder", "layer", "both", {"chance": chance}))
        records += own
    caption = f"XLM-E table 5 and figure 3 at our scale, on {what}: {', '.join(options.folders)}"
    keys = "sentences", "encoder", "layer"
    show("retrieval", caption, options, records, panels, keys, rows)


def accuracy_of(group: str, encoder: str, forth: float, back: float, layer="", run="") -> dict:
    """A record: accuracy in percent from English to another language, and back."""
    record = {"run": run, "sentences": group, "encoder": encoder, "layer": layer}
    both = (forth + back) / 2
    return record | {"en to xx": forth, "xx to en": back, "both": both}


def sentences(options: Retrieval) -> tuple[bitext_sets.Pairs, dict, str]:
    """The pairs of each language, the groups of languages whose means are shown, and what they are in words."""
    if options.source is None:
        texts, what = bitext_sets.held_out(ready("catalogs-pairs")), "held-out messages of Django, not Tatoeba"
        groups = {"Django's messages": list(texts)}
    else:
        texts, what = bitext_sets.tatoeba(Path(options.source)), f"Tatoeba, {options.source}"
        groups = {"Tatoeba-14": bitext_sets.TATOEBA_14, "Tatoeba-36": bitext_sets.TATOEBA_36}
    if options.whiten:
        what += ", with like spread in all directions"
    texts = {language: pairs[: options.most] for language, pairs in texts.items()}
    return texts, groups, what


def find_translations(opened: list[Opened], texts: dict, options: Retrieval, context: Context) -> list[dict]:
    """Of each encoder: language -> how often it finds the translation by layer, (2, L + 1), from English and to it."""
    found = []
    with tqdm(total=len(opened) * len(texts), unit="language") as bar:
        for one in opened:
            how = {"micro_tokens": options.micro_tokens, "context": context}
            vectors_of = partial(measures.sentence_vectors, one.encoder, one.tokenizer, **how)
            found.append({})
            for language, pairs in texts.items():
                foreign, english = map(vectors_of, zip(*pairs))
                if options.whiten:
                    foreign, english = measures.whitened(foreign, english)
                accuracy = measures.both_directions(english, foreign)
                found[-1][language] = accuracy.cpu()
                bar.update()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Table 6 and figure 4


@dataclass
class Alignment(Encoders):
    """XLM-E's table 6 and figure 4: the error of word alignments by optimal transport (AER, lower is better).

    The pieces of a sentence and of its translation are as similar as the dot products of their states say. Beside it
    stands what needs no model, the diagonal: each word with the one that is as far into the other sentence.
    """

    source: str | None = None  # folder of de-en.src-tgt (source ||| target, in words) and de-en.gold, and so on
    # both sentences in one sequence, as in XLM-Align's published aligner, where that is not too long; false: apart
    together: bool = True


PAPER_ALIGNMENT = {  # table 6
    "fast_align": {"de-en": 32.14, "en-fr": 19.46, "en-hi": 59.90},
    "XLM-R": {"de-en": 17.74, "en-fr": 7.54, "en-hi": 37.79, "en-ro": 27.49},
    "XLM-Align": {"de-en": 16.63, "en-fr": 6.61, "en-hi": 33.98, "en-ro": 26.97},
    "XLM-E": {"de-en": 16.49, "en-fr": 6.19, "en-hi": 30.20, "en-ro": 24.41},
    "XLM-E - TRTD": {"de-en": 17.87, "en-fr": 6.29, "en-hi": 35.02, "en-ro": 30.22},
}


def alignment(options: Alignment):
    if options.source is None:
        raise ValueError("say where alignments by hand are: --source FOLDER with de-en.src-tgt and de-en.gold")
    sets, notes = bitext_sets.word_alignments(Path(options.source))
    for note in notes:
        warn(note)
    context = setup(options.device, options.dtype)
    opened = open_encoders(options, context)
    records, rows = [], []
    for one in opened:
        errors = align_sets(one, sets, options, context)
        for layer in range(one.encoder.config.n_layer + 1):
            own = {name: errors[name][layer] for name in errors}
            records.append(error_record(one.kind, own, layer, one.run))
            if layer == one.layer:
                rows.append(records[-1])
    diagonals = {name: error_of(map(diagonal, pairs), pairs) for name, pairs in sets.items()}
    rows.append(error_record("the diagonal", diagonals))
    for paper, theirs in PAPER_ALIGNMENT.items():
        row = {"encoder": f"paper: {paper}", "layer": "", "mean": None}
        for name in sets:
            languages = sorted(name.split("-"))  # en-de is de-en
            row[name] = theirs.get("-".join(languages))
        rows.append(row)
    how = "both sentences in one sequence" if options.together else "each sentence alone"
    levels = {"the diagonal": fmean(diagonals.values())}
    panel = Panel(f"Word alignment, AER, %: {', '.join(sets)}", records, "encoder", "layer", "mean", levels)
    caption = f"XLM-E table 6 and figure 4 at our scale, {how}: {', '.join(options.folders)}"
    keys = "encoder", "layer"
    show("alignment", caption, options, records, [panel], keys, rows)


def error_record(encoder: str, errors: dict[str, float], layer="", run="") -> dict:
    """A record: AER in percent of each set of sentences, and the mean."""
    record = {"run": run, "encoder": encoder, "layer": layer}
    record["mean"] = fmean(errors.values())
    return record | errors


def align_sets(one: Opened, sets: dict, options: Alignment, context: Context) -> dict[str, list]:
    """set -> AER in percent by layer."""
    errors = {}
    for name, pairs in sets.items():
        links = []  # of each pair of sentences, by layer
        for first in tqdm(range(0, len(pairs), 32), desc=f"{one.kind}, {name}"):
            links += align(pairs[first : first + 32], one, options, context)
        errors[name] = [error_of(of_layer, pairs) for of_layer in zip(*links)]
    return errors


def error_of(links: Iterable[set], pairs: list[Aligned]) -> float:
    """AER in percent of the links that were found in each pair of sentences."""
    sure = [pair.sure for pair in pairs]
    possible = [pair.possible for pair in pairs]
    return 100 * measures.alignment_error(list(links), sure, possible)


def diagonal(pair: Aligned) -> set[tuple]:
    """Each word with the one that stands as far into the other sentence."""
    m, n = len(pair.one), len(pair.two)
    return {(i, min(round(i * n / m), n - 1)) for i in range(m)}


def align(pairs: list, one: Opened, options: Alignment, context: Context) -> list[list[set]]:
    """Of each pair of sentences, by layer, the links between its words. What is too long for a row is cut."""
    bos, eos = one.tokenizer.bos, one.tokenizer.eos
    room = one.encoder.config.block_size - 2
    rows, parts = [], []  # parts: of each pair the rows with its sides, and the words that these pieces are of
    for pair in pairs:
        ids, words = pieces(pair.one, one.tokenizer)
        more, others = pieces(pair.two, one.tokenizer)
        first = len(rows)
        if options.together and len(ids) + len(more) < room:
            rows.append([bos, *ids, eos, *more, eos])
        else:
            rows.append([bos, *ids[:room], eos])
            rows.append([bos, *more[:room], eos])
        last = len(rows) - 1  # the same row, or the next
        parts.append((first, last, words[:room], others[:room]))
    states = states_of(one, rows, options, context)
    links = []
    for first, last, words, others in parts:
        e = states[first][:, 1 : 1 + len(words)]  # (L + 1, m, D)
        f = states[last][:, -1 - len(others) : -1]  # (L + 1, n, D)
        plan = measures.sinkhorn(e @ f.mT)
        aligned = measures.itermax(plan)
        links.append(measures.word_links(aligned, words, others))
    return links


def states_of(one: Opened, rows: list, options: Alignment, context: Context) -> list[torch.Tensor]:
    """(L + 1, T, D) the hidden states of each row."""
    states = [None] * len(rows)
    passes = measures.hidden_states(one.encoder, rows, options.micro_tokens, context)
    for chunk, _, layers in passes:
        layers = torch.stack(layers)  # (L + 1, B, T, D)
        for place, row in enumerate(chunk):
            states[row] = layers[:, place, : len(rows[row])]
    return states


def pieces(words: list[str], tokenizer: XLMR) -> tuple[list, list]:
    """The pieces of a sentence, and the word that each is of. A word of characters that are dropped is `<unk>`."""
    ids, words_of = [], []
    for word, own in enumerate(tokenizer.encode_batch(words)):
        own = own or [tokenizer.unk]
        ids += own
        words_of += [word] * len(own)
    return ids, words_of


# ---------------------------------------------------------------------------------------------------------------------
# Table 7


@dataclass
class Gap(Drawn):
    """XLM-E's table 7: the score in English minus the mean of the other languages, after fine-tuning in English.

    Lower is better where the score is well above a guess's: who guesses in all languages has no gap. Of answers the
    score is exact match. Guess, and counting "by word", are means over the other languages too. Seeds are averaged.
    """

    # finished runs of finetune_xtreme.py, or folders that hold many of them
    folders: tyro.conf.Positional[tuple[str, ...]] = ("out/finetune_xtreme",)


TASKS = {"xquad": "XQuAD", "mlqa": "MLQA", "tydiqa": "TyDiQA"}
TASKS |= {"xnli": "XNLI", "pawsx": "PAWS-X", "pos": "POS", "ner": "NER", "apps": "apps (smoke test)"}
PAPER_GAP = {  # table 7
    "XLM-R": dict(xquad=15.9, mlqa=20.3, tydiqa=15.2, xnli=10.4, pawsx=11.4),
    "XLM-E - TRTD": dict(xquad=16.3, mlqa=18.6, tydiqa=16.3, xnli=11.5, pawsx=9.6),
    "XLM-E": dict(xquad=14.9, mlqa=19.2, tydiqa=13.1, xnli=11.2, pawsx=8.8),
}


def gap(options: Gap):
    records = read_finetuned(options.folders)
    measured = [name for name in records[0] if name not in ("encoder", "task")]
    rows = list(records)
    for task, name in TASKS.items():
        for paper, theirs in PAPER_GAP.items():
            if task in theirs and any(record["task"] == name for record in records):
                row = {"encoder": f"paper: {paper}", "task": name} | dict.fromkeys(measured)
                rows.append(row | {"gap": theirs[task]})
    title = "English ahead of the mean of the other languages"
    panel = Panel(title, rows, "encoder", "task", "gap", {"none": 0.0}, joined=False)
    caption = f"XLM-E table 7 at our scale: {', '.join(options.folders[:3])}"
    if len(options.folders) > 3:
        caption += f" and {len(options.folders) - 3} more"
    keys = "encoder", "task"
    show("gap", caption, options, records, [panel], keys, rows)


def read_finetuned(folders: tuple[str, ...]) -> list[dict]:
    """A record of each result. Raises ValueError where there is none, or two are alike but for more than the seed."""
    records, configs = [], {}  # configs: (encoder, task) -> file and constants of each seed
    files = {}
    for folder in folders:
        for file in sorted(Path(folder).rglob("result.json")):
            files[file.resolve()] = file
    for file in files.values():
        result = read_json(file)
        others = result.get("languages", {}).keys() - {"en"}
        if not others:
            warn(f"{file} is left out: not of finetune_xtreme.py, or of English alone")
            continue
        config = result["config"]
        encoder, task = config["model"], config["task"]
        for before, other in configs.setdefault((encoder, task), []):
            alike = all_but(config, "seed") == all_but(other, "seed")
            if not alike or config["seed"] == other["seed"]:
                unlike = f"{before} and {file}, of the same encoder and task, do not differ by the seed alone"
                raise ValueError(f"{unlike}: give the folders of those that are meant")
        configs[encoder, task].append((file, config))
        record = {"encoder": encoder, "task": TASKS[task]}
        records.append(record | scores_of(result))
    if not records:
        raise ValueError(f"no result of finetune_xtreme.py in {', '.join(folders)}: run it, or name its folders")
    return sorted(records, key=lambda record: record["encoder"])


def scores_of(result: dict) -> dict[str, float | None]:
    """What table 7 shows of a result. English and the gap are None where a task has no English test."""
    metric = list(result["mean"])[-1]  # of answers exact match
    return {
        "English": result["languages"].get("en", {}).get(metric),
        "others": mean_of_others(result["languages"], metric),
        "gap": result["gap"].get(metric),
        "guess": mean_of_others(result["guesses"], metric),
        "by word": mean_of_others(result["counted"], metric),
    }


def mean_of_others(scores: dict[str, dict], metric: str) -> float | None:
    """The mean over languages that are not English; None where there are no scores."""
    others = [scores[language][metric] for language in scores if language != "en"]
    return fmean(others) if others else None
