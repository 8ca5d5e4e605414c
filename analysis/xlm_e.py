"""XLM-E's figures 1, 3 and 4, and tables 3 to 6: training curves, sizes, retrieval, word alignment."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import tyro

from analysis import shared
from analysis.shared import FigureOptions, Panel, TrainedRun
from data import bitext_sets
from data.bitext_sets import Aligned
from data.files import progress
from data.folder import ready
from data.tokenizers import XLMR
from engine import pretrained
from engine.device import setup
from engine.files import read_json
from engine.table import markdown_table
from metrics import crosslingual
from metrics.flops import flops_per_token, masked_head_flops, numel
from model import Encoder

FLOPS = "training FLOPs"
BY_LAYER = "encoder", "layer"  # the keys of a table's rows


def curve(options: FigureOptions):
    """XLM-E's figure 1: scores against training FLOPs. Higher at the same FLOPs is better.

    The scores are the share of held-out translations found, and the accuracy on masked tokens of held-out sentences
    (for XLM-E, the generator's). Chance is random guessing; `retrieval` also shows an untrained encoder. Pass runs of
    train_electra.py with either objective.
    """
    records, found, accuracy = [], "share of translations found", "accuracy on masked tokens"
    for run in shared.select_runs("train_electra", options):
        layer = crosslingual.middle_layer(run.config["n_layer"])
        for evaluation in run.log:
            scores = evaluation["held_out"]
            record = {"run": run.folder, "encoder": run.name, FLOPS: evaluation["flops"]}
            record |= {found: scores["retrieval"][layer], accuracy: scores["sentences"]["generator"]}
            records.append(record)
    panels = [
        Panel("Held-out translations", records, "encoder", FLOPS, found, {"chance": scores["chance"]}),
        Panel("Held-out sentences", records, "encoder", FLOPS, accuracy),
    ]
    shared.show(curve, options, records, ("encoder", FLOPS), panels)


@dataclass
class Encoders(FigureOptions):
    # runs of train_electra.py (the discriminator) or train_mlm.py, or XLM-R from Hugging Face; default: both demos
    folders: tyro.conf.Positional[tuple[str, ...]] = ()
    source: str | None = None  # folder of the paper's test set, see above; default: held-out pairs of ciphers
    device: str = "auto"  # cuda, mps or cpu


def by_layer(options: Encoders, demos: Callable, measure: Callable) -> tuple:
    """-> the records of all layers of every encoder, and those at 3/4 of the depth, for the table.

    Adds the first encoder with untrained weights. demos() -> the demos' folders; measure(encoder, tokenizer, context)
    -> {column: numbers by layer, starting at the embeddings}.
    """
    context = setup(options.device, "float32")
    folders = dict.fromkeys(map(Path, options.folders or demos()))
    encoders = {folder: pretrained.load_encoder(folder) for folder in folders}
    encoder, tokenizer = next(iter(encoders.values()))
    torch.manual_seed(0)
    encoders[Path("untrained")] = Encoder(encoder.config, encoder.vocab_size).eval(), tokenizer
    runs = [TrainedRun(run, read_json(run / "config.json"), []) for run in folders if pretrained.is_run(run)]
    names = {run.folder: run.name for run in shared.named(runs)}
    records, rows = [], []
    for folder, (encoder, tokenizer) in encoders.items():
        columns = measure(context.place(encoder), tokenizer, context)
        about = {"run": str(folder), "encoder": names.get(folder, folder.name)}
        numbers_by_layer = enumerate(zip(*columns.values()))
        layers = [about | {"layer": layer} | dict(zip(columns, numbers)) for layer, numbers in numbers_by_layer]
        records += layers
        rows.append(layers[crosslingual.middle_layer(encoder.config.n_layer)])
    return records, rows


PAPER_RETRIEVAL = {  # table 5: from English and back, means of 14 and of 36 languages
    "XLM-R": [(59.5, 57.6), (55.5, 53.4)],
    "InfoXLM": [(80.6, 77.8), (68.6, 67.3)],
    "XLM-E": [(74.4, 72.3), (65.0, 62.3)],
    "XLM-E - TRTD": [(55.8, 55.1), (46.4, 44.6)],
}


def retrieval(options: Encoders, demos: Callable):
    """XLM-E's table 5 and figure 3: how often the nearest sentence in the other language is the translation.

    A sentence vector is the mean of its hidden states at three quarters of the depth (for XLM-R the paper uses layer 7
    of 12); sentences are compared by cosine. Higher is better. --source is the folder with LASER's tatoeba.deu-eng.deu,
    tatoeba.deu-eng.eng, and so on.
    """
    texts, groups = sentences(options.source)

    def measure(encoder, tokenizer, context) -> dict[str, list]:
        found = {}  # language -> share of translations found from and to English, (2, L + 1)
        for language, pairs in progress(texts.items(), "languages"):
            sides = zip(*pairs)
            foreign, english = (crosslingual.sentence_vectors(encoder, tokenizer, s, 2048, context) for s in sides)
            found[language] = crosslingual.both_directions(english, foreign).cpu()
        means = []
        for languages in groups.values():
            shares = torch.stack([found[language] for language in languages])
            means.append((100 * shares.mean(dim=0)).double())
        return {name: percents.tolist() for name, percents in in_columns(groups, means).items()}

    records, rows = by_layer(options, demos, measure)
    panels, chances = [], []
    for group, languages in groups.items():
        chance = 100 * fmean(1 / len(texts[language]) for language in languages)
        chances.append((chance, chance))
        title = f"{len(languages)} languages, mean of both directions"
        panels.append(Panel(title, records, "encoder", "layer", f"{group} found, %", {"chance": chance}))
    rows.append({"encoder": "chance"} | in_columns(groups, chances))
    for name, percents in PAPER_RETRIEVAL.items() if options.source else ():
        rows.append({"encoder": f"paper: {name}"} | in_columns(groups, percents))
    shared.show(retrieval, options, records, BY_LAYER, panels, rows)


def in_columns(groups: Iterable, percents: Iterable) -> dict:
    """The table's columns; percents: for each group, from English and to English."""
    columns = {}
    for group, (forth, back) in zip(groups, percents):
        columns[f"{group}, en to xx"] = forth
        columns[f"{group}, xx to en"] = back
        columns[f"{group} found, %"] = (forth + back) / 2
    return columns


def sentences(source: str | None) -> tuple[bitext_sets.Pairs, dict]:
    """The sentence pairs by language, and the groups of languages to average over."""
    if source is None:
        texts = bitext_sets.held_out(ready("ciphers-pairs"))
        return texts, {"ciphers": list(texts)}
    texts, groups = bitext_sets.tatoeba(Path(source)), {}
    for group, languages in {"Tatoeba-14": bitext_sets.TATOEBA_14, "Tatoeba-36": bitext_sets.TATOEBA_36}.items():
        groups[group] = [language for language in languages if language in texts]
        if not groups[group]:
            raise ValueError(f"{source} has no language of {group}")
    return texts, groups


MEAN = "mean AER, %"
PAPER_SETS = "de-en", "en-fr", "en-hi", "en-ro"
PAPER_ALIGNMENT = {  # table 6
    "fast_align": (32.14, 19.46, 59.90, None),
    "XLM-R": (17.74, 7.54, 37.79, 27.49),
    "XLM-Align": (16.63, 6.61, 33.98, 26.97),
    "XLM-E": (16.49, 6.19, 30.20, 24.41),
    "XLM-E - TRTD": (17.87, 6.29, 35.02, 30.22),
}


def alignment(options: Encoders, demos: Callable):
    """XLM-E's table 6 and figure 4: alignment error rate (AER) of words aligned by optimal transport; lower is better.

    The similarity of two pieces is the dot product of their hidden states, computed on both sentences in one sequence
    if they fit, as in XLM-Align's released aligner. Mutual best matches are aligned, and a second round aligns the
    pieces that are left (Itermax). "the diagonal" is a trivial baseline: each word is aligned with the word at the same
    relative position. For ciphers that is the correct alignment. --source is the folder with de-en.src-tgt (source |||
    target, in words), de-en.gold, and so on.
    """
    source = options.source
    sets = bitext_sets.word_alignments(Path(source)) if source else bitext_sets.letters(ready("ciphers-pairs"))

    def measure(encoder, tokenizer, context) -> dict[str, list]:
        errors = {}  # set -> AER by layer
        for name, pairs in sets.items():
            links = [align(pair, encoder, tokenizer, context) for pair in progress(pairs, name)]
            errors[name] = [crosslingual.alignment_error(layer, pairs) for layer in zip(*links)]
        return {MEAN: list(map(fmean, zip(*errors.values())))} | errors

    records, rows = by_layer(options, demos, measure)
    diagonals = {name: crosslingual.alignment_error(map(diagonal, pairs), pairs) for name, pairs in sets.items()}
    mean = fmean(diagonals.values())
    rows.append({"encoder": "the diagonal", MEAN: mean} | diagonals)
    for name, percents in PAPER_ALIGNMENT.items() if source else ():
        rows.append({"encoder": f"paper: {name}"} | dict(zip(PAPER_SETS, percents)))
    panel = Panel(f"Mean of {', '.join(sets)}", records, "encoder", "layer", MEAN, {"the diagonal": mean})
    shared.show(alignment, options, records, BY_LAYER, [panel], rows)


def diagonal(pair: Aligned) -> set[tuple]:
    """Links each word to the one at the same relative position in the other sentence."""
    m, n = len(pair.one), len(pair.two)
    return {(i, min(round(i * n / m), n - 1)) for i in range(m)}


def align(pair: Aligned, encoder, tokenizer: XLMR, context) -> list[set]:
    """The links by layer: pairs of words with an aligned pair of pieces. Sentences that are too long are cut."""
    bos, eos = tokenizer.bos, tokenizer.eos
    room = encoder.config.block_size - 2
    ids1, words1 = pieces(pair.one, tokenizer)
    ids2, words2 = pieces(pair.two, tokenizer)
    rows = [[bos, *ids1, eos, *ids2, eos]]
    if len(rows[0]) > room + 2:
        rows = [[bos, *ids1[:room], eos], [bos, *ids2[:room], eos]]
    words1, words2 = words1[:room], words2[:room]
    states = [torch.cat(crosslingual.hidden_states(encoder, [row], context)[0]) for row in rows]  # (L + 1, T, D) each
    e = states[0][:, 1 : 1 + len(words1)]  # (L + 1, m, D)
    f = states[-1][:, -1 - len(words2) : -1]  # (L + 1, n, D)
    aligned = crosslingual.itermax(crosslingual.sinkhorn(e @ f.mT))
    return [{(words1[i], words2[j]) for i, j in layer.nonzero().tolist()} for layer in aligned]


def pieces(words: list, tokenizer: XLMR) -> tuple[list, list]:
    """The ids of a sentence's pieces, and the index of each piece's word. A word without pieces becomes `<unk>`."""
    ids, word_of = [], []
    for word, word_ids in enumerate(tokenizer.encode_batch(words)):
        word_ids = word_ids or [tokenizer.unk]
        ids += word_ids
        word_of += [word] * len(word_ids)
    return ids, word_of


# ---------------------------------------------------------------------------------------------------------------------
# Tables 3 and 4: counts, nothing is trained

# The paper states a vocabulary of 500K for the larger two, but only 2^19 gives the table's numbers.
TABLE3 = {"base": (250_002, "279M"), "large": (1 << 19, "840M"), "xl": (1 << 19, "2.2B")}  # vocabulary, parameters


@dataclass
class Flops:
    """No options."""


def flops(options: Flops, sizes: dict):
    """XLM-E's tables 3 and 4: parameters and training FLOPs of the paper's sizes."""
    rows = []
    for preset, (V, paper) in TABLE3.items():
        with torch.device("meta"):  # weights with shapes but no data
            network = Encoder(sizes[preset], V)
        D = network.config.n_embd
        head = D * D + D + 2 * D + D + 1  # a dense layer, a norm, and one logit per token
        rows.append([preset, f"{V:,}", paper, f"{head + numel(network):,}"])
    print("XLM-E table 3: parameters of the discriminator with its head\n")
    print(markdown_table(["preset", "vocabulary", "paper", "here"], rows))
    # Table 4 counts matrix products, the backward pass twice.
    config, V = sizes["base"], TABLE3["base"][0]
    with torch.device("meta"):
        large, small = Encoder(config, V), Encoder(replace(config, n_layer=config.generator_layers), V)
    D = config.n_embd
    heads = 2 * D * D + 2 * D, config.mask_share * masked_head_flops(small)  # the generator's sees masked tokens only
    per_token = sum(3 * flops_per_token(network, network.config, head) for network, head in zip((large, small), heads))
    batch = config.steps * config.batch_tokens * per_token
    rows = [
        ["XLM-E: a batch of sentences and one of pairs", "9.5e19", f"{2 * batch:.2e}"],
        ["XLM-E - TRTD: one batch", "6.3e19", f"{batch:.2e}"],
    ]
    print("\nXLM-E table 4: training FLOPs of 125,000 steps with batches of 2,048 x 512 tokens\n")
    print(markdown_table(["base", "paper", "here"], rows))
