"""XLM-E's tables 5, 6 and 7, figures 1, 3 and 4: training curves, retrieval, word alignment, transfer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch
import tyro
from tqdm import tqdm

import common
import measures
import pretrained
import runs
from data import bitext_sets
from data.bitext_sets import Aligned
from data.prepare import ready
from data.tokenizers import XLMR
from figures.shared import COLORS, Drawn, all_but_seed, but_for_seed, canvas, named, read_run, save
from model import Encoder

# ---------------------------------------------------------------------------------------------------------------------
# Figure 1


@dataclass
class Curve(Drawn):
    """XLM-E's figure 1: a score against training FLOPs. Higher at the same FLOPs is better.

    At our scale: held-out translations found, and masked tokens of held-out sentences right.
    """

    # folders of runs of train_electra.py, of either objective; none: all of the demo in out/train_electra
    folders: tyro.conf.Positional[tuple[str, ...]] = ()


def curve(options: Curve):
    folders = options.folders or sorted(
        str(log.parent) for log in Path("out/train_electra").glob("demo*/metrics.jsonl")
    )
    if not folders:
        raise ValueError("out/train_electra holds no run of the demo: python train_electra.py, or give folders of runs")
    figure = canvas(columns=2)
    found, right = figure.axes
    numbers = {}
    read = {folder: read_run(folder, "train_electra") for folder in folders}
    configs = {folder: config for folder, (config, _) in read.items()}
    names = named(configs, lambda config: "XLM-E" if config["objective"] == "rtd" else "XLM")
    for number, (folder, (config, records)) in enumerate(read.items()):
        color = COLORS[number % len(COLORS)]
        label = f"{names[folder]}, seed {config['seed']}"
        layer = measures.middle_layer(config["n_layer"])
        scores = [record["held_out"] for record in records]
        drawn = numbers[folder] = {
            "flops": [record["flops"] for record in records],
            "retrieval": [score["retrieval"][layer] for score in scores],
            "generator": [score["sentences"]["generator"] for score in scores],
        }
        found.plot(drawn["flops"], drawn["retrieval"], "o-", color=color, label=label)
        right.plot(drawn["flops"], drawn["generator"], "o-", color=color, label=label)
        if config["objective"] == "rtd":
            drawn["saved"] = [score["sentences"]["saved"] for score in scores]
            right.plot(drawn["flops"], drawn["saved"], "s:", color=color, label=f"{label}: loss saved on replaced ones")
        drawn["chance"] = scores[0]["chance"]
    for chance in {drawn["chance"] for drawn in numbers.values()}:  # of each corpus
        found.axhline(chance, color="gray", linestyle="--", label="chance")
    found.set(xlabel="training FLOPs (products)", ylabel="share", title="Held-out translations found")
    right.set(xlabel="training FLOPs (products)", ylabel="share", title="Masked tokens of held-out sentences right")
    found.legend()
    right.legend()
    save(figure, "curve", f"XLM-E figure 1 at our scale: {', '.join(folders)}", numbers, options)


# ---------------------------------------------------------------------------------------------------------------------
# Tables 5 and 6, figures 3 and 4; table 7


@dataclass
class Encoders(Drawn):
    """Options of what compares the layers of encoders."""

    # runs of train_electra.py (its discriminator) or train_mlm.py, or XLM-R in Hugging Face's format
    folders: tyro.conf.Positional[tuple[str, ...]] = ("out/train_electra/demo", "out/train_mlm/demo")
    layer: int | None = None  # of the table (0: embeddings); none: that at 3/4 of the depth, the 9th of 12
    micro_tokens: int = 2048  # tokens of one forward pass
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: bfloat16 where it is fast


RANDOM = ", random weights"  # behind the name of an encoder that has learned nothing


class Opened(NamedTuple):
    """An encoder to be measured."""

    name: str
    kind: str  # the name that it has with seed 0: runs of one kind are a row of the table, and lines of a color
    encoder: Encoder
    tokenizer: XLMR
    layer: int  # of the table


def open_encoders(options: Encoders, context) -> list[Opened]:
    """Every encoder, and behind the first of a kind one of its shape with random weights, which has learned nothing."""
    found, configs = [], {}
    for folder in dict.fromkeys(map(Path, options.folders)):
        encoder, tokenizer = pretrained.load_encoder(folder)
        L = encoder.config.n_layer
        layer = measures.middle_layer(L) if options.layer is None else options.layer
        if layer not in range(L + 1):
            raise ValueError(f"layer must be from 0 to {L} in {folder}, not {layer}")
        common.seed_all(0)
        constants = runs.read_json(folder / "config.json")
        name, seed, config = "/".join(folder.parts[-2:]), constants.get("seed", 0), all_but_seed(constants)
        kind = but_for_seed(name, seed)
        if configs.get(kind, config) != config or name in [one.name for one in found]:
            name, kind = str(folder), but_for_seed(str(folder), seed)  # they only look alike
        first = kind not in configs
        configs[kind] = config
        found.append(Opened(name, kind, common.place(encoder, context), tokenizer, layer))
        if first:
            untrained = common.place(Encoder(encoder.config).eval(), context)
            found.append(Opened(name + RANDOM, kind + RANDOM, untrained, tokenizer, layer))
    return found


def rows_by_kind(opened: list[Opened], numbers: list[list[float]], form: str) -> list[list]:
    """Rows of a table: what the encoders are, the layer, and the means over seeds of their numbers."""
    kinds = {}
    for one, own in zip(opened, numbers):
        kinds.setdefault((one.kind, one.layer), []).append([(number, form) for number in own])
    return [[*kind, *map(runs.mean_cell, zip(*seeds))] for kind, seeds in kinds.items()]


def draw_layers(axes, opened: list[Opened], scores: list[list[float]], baseline: float, name: str):
    """A line by layer for each encoder and, dotted in the same color, for its shape with random weights."""
    colors, shown = {}, set()
    for one, by_layer in zip(opened, scores):
        color = colors.setdefault(one.kind.removesuffix(RANDOM), COLORS[len(colors) % len(COLORS)])
        label = one.kind if one.kind not in shown else None  # a kind is named once
        shown.add(one.kind)
        axes.plot(range(len(by_layer)), by_layer, "o:" if one.kind.endswith(RANDOM) else "o-", color=color, label=label)
    axes.axhline(baseline, color="gray", linestyle="--", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: embeddings)")


@dataclass
class Retrieval(Encoders):
    """XLM-E's table 5 and figure 3: how often the nearest sentence in the other language is the translation.

    A sentence is the mean of its tokens' hidden states, and nearness the cosine. Higher is better; what training taught
    is what an encoder finds beyond its shape with random weights, which knows shared words and lengths.
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
    if options.source is None:
        texts, what = bitext_sets.held_out(ready("catalogs-pairs")), "held-out messages of Django, not Tatoeba"
        groups, papers = {"Django's messages": texts}, {}
    else:
        texts, what = bitext_sets.tatoeba(Path(options.source)), f"Tatoeba, {options.source}"
        groups = {"Tatoeba-14": bitext_sets.TATOEBA_14, "Tatoeba-36": bitext_sets.TATOEBA_36}
        papers = PAPER_RETRIEVAL
    if options.whiten:
        what += ", with like spread in all directions"
    if options.most < 1:
        raise ValueError(f"most must be over 0, not {options.most}")
    texts = {language: pairs[: options.most] for language, pairs in texts.items()}
    context = common.setup(options.device, options.dtype)
    opened = open_encoders(options, context)
    found = find_translations(opened, texts, options, context)
    groups = {group: wanted for group, wanted in groups.items() if texts.keys() & set(wanted)}
    figure, headers = canvas(columns=len(groups), width=7, height=5), ["accuracy, %", "layer"]
    cells, by_chance, of_papers = [[] for _ in opened], ["chance", ""], [[f"paper: {name}", ""] for name in papers]
    numbers = {"encoders": [one.name for one in opened], "layers": [one.layer for one in opened], "means": {}}
    for axes, (group, wanted) in zip(figure.axes, groups.items()):
        there = [language for language in wanted if language in texts]
        missing = [language for language in wanted if language not in texts]
        means = [torch.stack([by_language[language] for language in there]).mean(dim=0) for by_language in found]
        chance = fmean(1 / len(texts[language]) for language in there)
        draw_layers(axes, opened, [100 * mean.mean(dim=0) for mean in means], 100 * chance, "chance")
        axes.set(ylabel="accuracy, %, mean of both directions", title=f"{group}: {len(there)} languages")
        axes.set_ylim(bottom=0)
        headers += [f"{group}: en to xx", "xx to en"]
        for own, one, mean in zip(cells, opened, means):
            own += (100 * mean[:, one.layer]).tolist()
        by_chance += 2 * [f"{100 * chance:.1f}"]
        for row, theirs in zip(of_papers, papers.values()):
            row += theirs[group]
        numbers["means"][group] = {"found": [mean.tolist() for mean in means], "chance": chance, "missing": missing}
        if missing:
            print(f"{group}, without what {options.source} lacks: {', '.join(missing)}")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    print(f"\nXLM-E table 5: sentences whose translation is the nearest ({what})\n")
    numbers["languages"] = [{language: scores.tolist() for language, scores in one.items()} for one in found]
    caption = f"XLM-E figure 3 at our scale, on {what}: {', '.join(options.folders)}"
    table = [headers, *rows_by_kind(opened, cells, ".1f"), by_chance, *of_papers]
    save(figure, "retrieval", caption, numbers, options, table)


def find_translations(opened: list[Opened], texts: bitext_sets.Pairs, options: Retrieval, context) -> list[dict]:
    """Of each encoder: language -> how often it finds the translation by layer, (2, L + 1), from English and to it."""
    found = []
    with tqdm(total=len(opened) * len(texts), unit="language") as bar:
        for one in opened:
            found.append({})
            how = dict(micro_tokens=options.micro_tokens, context=context)
            vectors_of = partial(measures.sentence_vectors, one.encoder, one.tokenizer, **how)
            for language, pairs in texts.items():
                foreign, english = map(vectors_of, zip(*pairs))
                if options.whiten:
                    foreign, english = measures.whitened(foreign, english)
                found[-1][language] = measures.both_directions(english, foreign).cpu()
                bar.update()
    return found


@dataclass
class Alignment(Encoders):
    """XLM-E's table 6 and figure 4: the error of word alignments by optimal transport (AER, lower is better).

    The pieces of a sentence and of its translation are as similar as the dot products of their states say. Beside it
    stands what needs no model, the diagonal: each word with the one that is as far into the other sentence.
    """

    source: str | None = None  # folder of de-en.src-tgt (source ||| target, in words) and de-en.gold, and so on
    # both sentences in one sequence, as in XLM-Align's published aligner, where that is not too long; false: apart
    together: bool = True
    rounds: int = 2  # of Itermax; 1: pieces that are each other's best, and no more


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
        common.warn(note)
    context = common.setup(options.device, options.dtype)
    opened = open_encoders(options, context)
    errors, long = align_sets(opened, sets, options, context)
    diagonals = {name: error_of([diagonal(pair) for pair in pairs], pairs) for name, pairs in sets.items()}
    cells = []
    for one, by_set in zip(opened, errors):
        own = [by_layer[one.layer] for by_layer in by_set.values()]
        cells.append([*own, fmean(own)])
    rows = rows_by_kind(opened, cells, ".2f")
    rows.append(["the diagonal", "", *(f"{error:.2f}" for error in (*diagonals.values(), fmean(diagonals.values())))])
    for name, theirs in PAPER_ALIGNMENT.items():
        cells = [theirs.get("-".join(sorted(each.split("-"))), "") for each in sets]  # en-de is de-en
        rows.append([f"paper: {name}", "", *cells, ""])
    how = "both sentences in one sequence" if options.together else "each sentence alone"
    trained = [(one, counts) for one, counts in zip(opened, long) if not one.kind.endswith(RANDOM)]
    for one, counts in trained:
        for what, count in counts.items():
            print(f"{one.name}: {count:,} of {sum(map(len, sets.values())):,} {what}")
    figure = canvas(width=7, height=5)
    (axes,) = figure.axes
    means = [list(map(fmean, zip(*by_set.values()))) for by_set in errors]
    draw_layers(axes, opened, means, fmean(diagonals.values()), "the diagonal")
    axes.set(ylabel="AER, % (lower is better)", title=f"Word alignment: mean over {', '.join(sets)}")
    figure.legend(loc="outside upper center", ncols=2)
    numbers = {"encoders": [one.name for one in opened], "layers": [one.layer for one in opened], "errors": errors}
    numbers |= {"diagonal": diagonals, "means": means, "long": long}
    print(f"XLM-E table 6: AER, %, {how}\n")
    caption = f"XLM-E figure 4 at our scale, {how}: {', '.join(options.folders)}"
    save(figure, "alignment", caption, numbers, options, [["", "layer", *sets, "mean"], *rows])


def align_sets(opened: list[Opened], sets: dict[str, list[Aligned]], options: Alignment, context) -> tuple[list, list]:
    """Of each encoder: set -> AER in percent by layer; and how many pairs did not fit into its rows."""
    errors, long = [], []
    with tqdm(total=len(opened) * sum(map(len, sets.values())), unit="pair") as bar:
        for one in opened:
            errors.append({})
            long.append(Counter())
            for name, pairs in sets.items():
                links = []  # of each pair of sentences, by layer
                for first in range(0, len(pairs), 32):
                    some = pairs[first : first + 32]
                    links += align(some, one, options, context, long[-1])
                    bar.update(len(some))
                errors[-1][name] = [error_of(layer, pairs) for layer in zip(*links)]
    return errors, long


def error_of(links: Iterable[set], pairs: list[Aligned]) -> float:
    sure, possible = [pair.sure for pair in pairs], [pair.possible for pair in pairs]
    return 100 * measures.alignment_error(list(links), sure, possible)


def diagonal(pair: Aligned) -> set[tuple[int, int]]:
    """Each word with the one that stands as far into the other sentence."""
    m, n = len(pair.one), len(pair.two)
    return {(i, min(round(i * n / m), n - 1)) for i in range(m)}


def align(pairs: list[Aligned], one: Opened, options: Alignment, context, long: Counter) -> list[list[set]]:
    """Of each pair of sentences, by layer, the links between its words. `long` counts what did not fit in a row."""
    bos, eos, T = one.tokenizer.bos, one.tokenizer.eos, one.encoder.config.block_size
    rows, parts = [], []  # parts: of each pair the rows with its sides, and the words that these pieces are of
    for pair in pairs:
        (ids, words), (more, others) = (pieces(side, one.tokenizer) for side in (pair.one, pair.two))
        first = len(rows)
        if options.together and len(ids) + len(more) + 3 <= T:
            rows.append([bos, *ids, eos, *more, eos])
        else:
            if options.together:
                long["pairs are too long for one sequence: two"] += 1
            if max(len(ids), len(more)) > T - 2:
                long["pairs have a sentence that is too long alone: cut"] += 1
            rows += [[bos, *side[: T - 2], eos] for side in (ids, more)]
        parts.append((first, len(rows) - 1, words[: T - 2], others[: T - 2]))  # one row or two
    states = [None] * len(rows)
    for chunk, _, layers in measures.hidden_states(one.encoder, rows, options.micro_tokens, context):
        for place, row in enumerate(chunk):
            states[row] = torch.stack([layer[place, : len(rows[row])] for layer in layers])  # (L + 1, T, D)
    links = []
    for first, last, words, others in parts:
        e = states[first][:, 1 : 1 + len(words)]  # (L + 1, m, D)
        f = states[last][:, -1 - len(others) : -1]  # (L + 1, n, D)
        plan = measures.sinkhorn(e @ f.mT)
        links.append(measures.word_links(measures.itermax(plan, options.rounds), words, others))
    return links


def pieces(words: list[str], tokenizer: XLMR) -> tuple[list[int], list[int]]:
    """The pieces of a sentence, and the word that each is of. A word of characters that are dropped is `<unk>`."""
    ids, words_of = [], []
    for word, own in enumerate(tokenizer.encode_batch(words)):
        own = own or [tokenizer.unk]
        ids += own
        words_of += [word] * len(own)
    return ids, words_of


@dataclass
class Gap(Drawn):
    """XLM-E's table 7: the score in English minus the mean of the other languages, after fine-tuning in English.

    Lower is better, where the score is well above a guess's: who guesses in all languages has no gap. Answers by EM.
    Guess, and counting "by word", are means over the other languages too.
    """

    # of finished runs of finetune_xtreme.py, or of many of them; seeds are averaged
    folders: tyro.conf.Positional[tuple[str, ...]] = ("out/finetune_xtreme",)


XTREME = dict(xquad="XQuAD", mlqa="MLQA", tydiqa="TyDiQA", xnli="XNLI", pawsx="PAWS-X", pos="POS", ner="NER")
XTREME |= dict(apps="apps (smoke test)")
PAPER_GAP = {  # table 7
    "XLM-R": dict(xquad=15.9, mlqa=20.3, tydiqa=15.2, xnli=10.4, pawsx=11.4),
    "XLM-E - TRTD": dict(xquad=16.3, mlqa=18.6, tydiqa=16.3, xnli=11.5, pawsx=9.6),
    "XLM-E": dict(xquad=14.9, mlqa=19.2, tydiqa=13.1, xnli=11.2, pawsx=8.8),
}


def gap(options: Gap):
    results = read_finetuned(options.folders)
    models = list(dict.fromkeys(model for model, _ in results))
    tasks = [task for task in XTREME if any((model, task) in results for model in models)]
    rows, gaps = [], {model: {} for model in models}
    for model, task in sorted(results, key=lambda key: (models.index(key[0]), tasks.index(key[1]))):
        seeds = results[model, task]
        cells = [runs.mean_cell([(one[what], ".1f") for one in seeds]) for what in seeds[0]]
        rows.append([model, XTREME[task], *cells, *(theirs.get(task, "") for theirs in PAPER_GAP.values())])
        if seeds[0]["gap"] is not None:
            gaps[model][task] = fmean(one["gap"] for one in seeds)
    headers = ["encoder", "task", *next(iter(results.values()))[0], *(f"paper: {name}" for name in PAPER_GAP)]
    print("XLM-E table 7: English minus the mean of the other languages\n")
    drawn = {"/".join(Path(model).parts[-2:]): own for model, own in gaps.items()}
    if PAPER_GAP["XLM-E"].keys() & set(tasks):
        drawn["XLM-E in the paper"] = PAPER_GAP["XLM-E"]
    figure = canvas(width=6 + len(tasks), height=5)
    (axes,) = figure.axes
    width = 0.8 / len(drawn)
    for number, (name, own) in enumerate(drawn.items()):
        places = [place + (number - (len(drawn) - 1) / 2) * width for place, task in enumerate(tasks) if task in own]
        heights = [own[task] for task in tasks if task in own]
        color = "0.75" if own is PAPER_GAP["XLM-E"] else COLORS[number % len(COLORS)]
        axes.bar(places, heights, width, color=color, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), [XTREME[task] for task in tasks])
    axes.set_xlim(-0.6, len(tasks) - 0.4)
    axes.set(ylabel="points (lower is better)", title="English ahead of the mean of the other languages")
    figure.legend(loc="outside upper center", ncols=2)
    numbers = {"gaps": gaps, "paper": PAPER_GAP}
    some, more = ", ".join(options.folders[:3]), len(options.folders) - 3
    caption = f"XLM-E table 7 at our scale: {some}{f' and {more} more' if more > 0 else ''}"
    save(figure, "gap", caption, numbers, options, [headers, *rows])


def read_finetuned(folders: tuple[str, ...]) -> dict[tuple[str, str], list[dict]]:
    """(encoder, task) -> scores of each seed. ValueError where there are none, or they differ not by the seed alone.

    Those of a task without an English test are None, and so is the gap.
    """
    found, first, seeds = {}, {}, {}
    files = [file for folder in folders for file in sorted(Path(folder).rglob("result.json"))]
    for file in {file.resolve(): file for file in files}.values():
        result = runs.read_json(file)
        if not result.get("languages", {}).keys() - {"en"}:
            common.warn(f"{file} is left out: not of finetune_xtreme.py, or of English alone")
            continue
        constants = result["config"]
        key = constants["model"], constants["task"]
        before, theirs = first.setdefault(key, (file, all_but_seed(constants)))
        ours = all_but_seed(constants)
        unlike = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if unlike:
            what = f"{before} and {file} are of the same encoder and task, with another {unlike[0]}"
            raise ValueError(f"{what}: give the folders of those that are meant")
        again = seeds.setdefault((*key, constants["seed"]), file)
        if again != file:
            raise ValueError(f"{again} and {file} are of the same encoder, task and seed: give the folder of one")
        metric = list(result["mean"])[-1]  # of answers EM
        scores = {
            "English": result["languages"].get("en", {}).get(metric),
            "others": mean_of_others(result["languages"], metric),
            "gap": result["gap"].get(metric),
            "guess": mean_of_others(result["guesses"], metric),
            "by word": mean_of_others(result["counted"], metric),
        }
        found.setdefault(key, []).append(scores)
    if not found:
        raise ValueError(f"no result of finetune_xtreme.py in {', '.join(folders)}: run it, or name its folders")
    return found


def mean_of_others(scores: dict[str, dict], metric: str) -> float | None:
    """Of languages that are not English; None where there are no scores."""
    return fmean(own[metric] for language, own in scores.items() if language != "en") if scores else None
