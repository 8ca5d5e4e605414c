"""XTREME: an encoder is fine-tuned on English alone, and scored in every language (X-MoE and XLM-E, their tables).

    python finetune_xtreme.py                              the demo, a smoke test: which of Django's applications a
                                                           message belongs to, by the encoder of `python train_mlm.py`
    python finetune_xtreme.py --model out/train_electra/demo                another encoder: XLM-E's discriminator
    python finetune_xtreme.py --preset xmoe-xnli --model DIR                a task by X-MoE's appendix C, from the hub
    python finetune_xtreme.py --preset xlme-mlqa --model /models/xlm-roberta-base --source XTREME_FOLDER
    python finetune_xtreme.py --preset xmoe-pos --search true               every combination of what was searched
    python finetune_xtreme.py --table 1 --source XTREME_FOLDER    a table, on a sample of each task, minutes a run:
                                                           X-MoE's 1, 3, 5, 6 and 7, or XLM-E's xlme1, xlme2 and xlme7
    python finetune_xtreme.py --table 1 --preset xmoe-xnli --source XTREME_FOLDER --seeds 5    by the paper's constants
    python finetune_xtreme.py --model out/finetune_xtreme/RUN --predict FILE      tags, answers or labels for your text

The checkpoint that is best in English (development set) is scored in every language, beside what a guess without a
model reaches. A run is kept in out/finetune_xtreme/NAME with what it predicted, in test-LANGUAGE.jsonl; the same
command goes on where it stopped. `--help` lists every constant.
"""

import hashlib
import json
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn
from tqdm import tqdm

from analysis import flops, measures
from data import xtreme, xtreme_rows, xtreme_scores
from data.files import read_lines
from data.tokenizers import XLMR, load_tokenizer
from data.xtreme import Example, Examples
from data.xtreme_rows import Row, TaskData
from engine import parallel, pretrained
from engine.config import refuse_others, said
from engine.device import clear_errors, seed_all, warn
from engine.optim import adamw, cross_entropy, linear, set_learning_rate
from engine.run import Run, newest
from engine.table import Table, carry_out, markdown_table, start
from model import Encoder, SparseModel, real_mask

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config:
    preset: str = "demo"  # demo, or a paper and a task: xmoe-xnli, xlme-pos; sample-pos: small (--table: of all tasks)
    table: str | None = None  # run every row of X-MoE's table 1, 3, 5, 6 or 7, or XLM-E's xlme1, xlme2 or xlme7
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    search: bool = False  # run every combination of the values that the paper searched for the task
    # the task, its data and the encoder
    task: Literal["pos", "ner", "xquad", "mlqa", "tydiqa", "xnli", "pawsx", "apps"] = "apps"
    model: str = "out/train_mlm/demo"  # the encoder: folder of a run, or of XLM-R in Hugging Face's format
    encoders: str = "demo"  # in tables: the preset of the runs of train_mlm.py and train_electra.py that are compared
    source: str | None = None  # folder with the task's files, or with XTREME's folders of all tasks; none: the hub
    train_source: str | None = None  # file or folder to train on, where it is another
    train_examples: int | None = None  # at most so many of them
    test_examples: int | None = None  # at most so many of each language
    # training
    frozen: bool = True  # routers and experts stay as they are (X-MoE 3.3); the balance loss still reaches the rest
    balance_coef: float = 0.01  # alpha, the weight of the balance loss, where there are sparse layers
    epochs: int = 10  # passes through the training rows
    batch_size: int = 16  # rows of a step, over all processes and micro-batches
    micro_size: int = 16  # rows of one forward pass
    block_size: int | None = None  # tokens of the longest row; none: as many as the encoder has positions for
    stride: int = 128  # tokens from the beginning of one part of a long text to the next; half a row at most
    longest_answer: int = 30  # tokens
    learning_rate: float = 3e-4  # peak
    warmup: float = 0.1  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam
    eps: float = 1e-8  # Adam
    weight_decay: float = 0.0  # of matrices and embeddings
    grad_clip: float = 1.0  # largest norm of the gradient; 0 for no limit
    dropout: float = 0.1  # in the encoder, and in the head of tags and labels
    seed: int = 0  # of the new layers' weights, data order and dropout
    log_every: int = 10  # steps from one look at the loss to the next
    # where and how
    out_dir: str = "out/finetune_xtreme"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    predict: str | None = None  # no training: say what --model, a run of this script, makes of this file

    @property
    def where(self) -> set[str]:
        """Constants that make no other run. Of the source it is what was read that counts, by a checksum."""
        return {"search", "encoders", "predict", "source"}

    def unread(self) -> set[str]:
        """Constants that a run does not read because of others: see engine/config.py."""
        names = set()
        if self.predict is not None:  # refused by predict_file
            return names
        if xtreme.TASKS[self.task].kind != "answer":
            names |= {"stride", "longest_answer"}
        if self.table is None:
            names |= {"encoders"}
        if self.table is None and self.task == "apps":
            names |= {"source", "train_source"}
        return names


# X-MoE appendix C and XLM-E table 11. A tuple: the paper searched these values, and the preset takes the middle one.
# Clipping, dropout, Adam's constants and lengths are those of XTREME's own scripts: the papers do not say. `sample` is
# for encoders of the demos' size, which take larger steps, on a part of each task.
BALANCE = (0.0, 1e-3, 1e-2, 1e-1)
TAG_RATES = (1e-5, 2e-5, 3e-5)
NER_RATES = (5e-6, 6e-6, 7e-6, 8e-6, 9e-6)
ANSWER_RATES = (2e-5, 3e-5, 4e-5)
SMALL = dict(batch_size=16, micro_size=16, dropout=0.0, test_examples=200)
TASKS = {
    "xmoe-pos": dict(batch_size=8, learning_rate=TAG_RATES, balance_coef=BALANCE),
    "xmoe-ner": dict(batch_size=8, learning_rate=NER_RATES, balance_coef=BALANCE),
    "xmoe-xquad": dict(learning_rate=ANSWER_RATES, epochs=(2, 3, 4), balance_coef=BALANCE),
    "xmoe-mlqa": dict(learning_rate=ANSWER_RATES, epochs=(2, 3, 4), balance_coef=BALANCE),
    "xmoe-tydiqa": dict(learning_rate=ANSWER_RATES, epochs=(10, 20, 40), balance_coef=BALANCE),
    "xmoe-xnli": dict(learning_rate=2e-5, epochs=5, warmup=0.2, weight_decay=0.01, balance_coef=BALANCE),
    "xmoe-pawsx": dict(learning_rate=(1e-5, 2e-5), balance_coef=BALANCE),
    "xlme-pos": dict(batch_size=(8, 16, 32), learning_rate=TAG_RATES),
    "xlme-ner": dict(batch_size=8, learning_rate=NER_RATES),
    "xlme-xquad": dict(learning_rate=ANSWER_RATES, epochs=4),
    "xlme-mlqa": dict(learning_rate=ANSWER_RATES, epochs=(2, 3, 4)),
    "xlme-tydiqa": dict(learning_rate=ANSWER_RATES, epochs=(10, 20, 40)),
    "xlme-xnli": dict(learning_rate=(5e-6, 6e-6, 7e-6, 8e-6), warmup=12_500 / 122_720),
    "xlme-pawsx": dict(learning_rate=(8e-6, 9e-6, 1e-5, 2e-5)),
    "sample-pos": SMALL | dict(train_examples=2000, epochs=6, learning_rate=2e-3),
    "sample-ner": SMALL | dict(train_examples=2000, epochs=6, learning_rate=2e-3),
    "sample-xquad": SMALL | dict(train_examples=1000, epochs=3, learning_rate=1e-3),
    "sample-mlqa": SMALL | dict(train_examples=1000, epochs=3, learning_rate=1e-3),
    "sample-tydiqa": SMALL | dict(train_examples=1000, epochs=3, learning_rate=1e-3),
    "sample-xnli": SMALL | dict(train_examples=5000, epochs=4),
    "sample-pawsx": SMALL | dict(train_examples=5000, epochs=10),
}
PRESETS, SEARCHED = {"demo": {}}, {"demo": {}}  # SEARCHED: a preset's constants with all values that were searched
for name, constants in TASKS.items():
    task = name.partition("-")[2]
    length = 384 if xtreme.TASKS[task].kind == "answer" else 128
    SEARCHED[name] = {constant: values for constant, values in constants.items() if isinstance(values, tuple)}
    middle = {constant: values[len(values) // 2] for constant, values in SEARCHED[name].items()}
    PRESETS[name] = dict(task=task, batch_size=32, micro_size=8, block_size=length) | constants | middle

# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows of encoders, each fine-tuned on several tasks, beside the paper's numbers (F1/EM of answers)

ALL = ("pos", "ner", "xquad", "mlqa", "tydiqa", "xnli", "pawsx")
DENSE, SMOE, X_MOE = "train_mlm/{}-router=dense", "train_mlm/{}-router=switch", "train_mlm/{}"
SMOE_SIGMOID, X_MOE_SIGMOID = f"{SMOE}-gate=sigmoid", f"{X_MOE}-gate=sigmoid"
XLM, XLM_E = "train_electra/{}-objective=mlm-relative_bias=False", "train_electra/{}"
LEARN = dict(frozen=False)
TITLES = {  # of a table: its title, and the tasks of its columns
    "1": ("X-MoE table 1: XTREME", ALL),
    "3": ("X-MoE table 3: reduction, L2 norm, frozen routing; sigmoid gate", ("xnli", "mlqa")),
    "5": ("X-MoE table 5: the routing dimension, sigmoid gate, N = 32 experts", ("xnli", "mlqa")),
    "6": ("X-MoE table 6: the balance loss in fine-tuning (the paper: validation data)", ("xnli", "mlqa")),
    "7": ("X-MoE table 7: one expert a token, and two", ("xnli",)),
    "xlme1": ("XLM-E table 1: XTREME", ALL),
    "xlme2": ("XLM-E table 2: ablation", ("xnli", "mlqa")),
    "xlme7": ("XLM-E table 7: English minus the mean of the other languages (EM of answers)", ALL[2:]),
}
ROWS = [  # table, encoder, its run, what to change in fine-tuning, the paper's number for each task
    ("1", "dense", DENSE, {}, "70.0, 61.1, 67.3/51.1, 58.7/41.1, 42.1/28.3, 70.1, 84.1"),
    ("1", "SMoE, softmax", SMOE, LEARN, "70.1, 60.9, 71.3/55.2, 62.8/44.8, 50.9/34.5, 71.5, 84.6"),
    ("1", "X-MoE, softmax", X_MOE, {}, "70.8, 63.2, 72.4/56.2, 64.5/46.3, 53.7/38.1, 72.0, 85.2"),
    ("1", "SMoE, sigmoid", SMOE_SIGMOID, LEARN, "70.6, 61.2, 71.5/55.7, 63.2/45.3, 50.1/35.1, 71.2, 85.1"),
    ("1", "X-MoE, sigmoid", X_MOE_SIGMOID, {}, "71.1, 62.7, 72.3/56.3, 64.3/46.0, 51.5/36.6, 72.2, 85.2"),
    ("3", "reduction, norm, frozen", X_MOE_SIGMOID, {}, "72.2, 64.3/46.0"),
    ("3", "norm, frozen", f"{X_MOE_SIGMOID}-routing_dim=0", {}, "71.5, 63.4/45.2"),
    ("3", "reduction, frozen", f"{SMOE_SIGMOID}-routing_dim=16", {}, "71.4, 63.0/45.2"),
    ("3", "reduction, norm", X_MOE_SIGMOID, LEARN, "71.7, 63.9/45.8"),
    ("3", "frozen", SMOE_SIGMOID, {}, "71.6, 63.6/45.5"),
    ("3", "none", SMOE_SIGMOID, LEARN, "71.2, 63.2/45.3"),
    ("5", "N / 4", f"{X_MOE_SIGMOID}-routing_dim=8", {}, "71.4, 64.3/46.4"),
    ("5", "N / 2", X_MOE_SIGMOID, {}, "72.2, 64.3/46.0"),
    ("5", "N", f"{X_MOE_SIGMOID}-routing_dim=32", {}, "71.7, 63.8/45.9"),
    ("5", "2 N", f"{X_MOE_SIGMOID}-routing_dim=64", {}, "71.7, 62.7/44.8"),
    ("5", "4 N", f"{X_MOE_SIGMOID}-routing_dim=128", {}, "71.2, 63.1/45.0"),
    ("6", "0", X_MOE, dict(balance_coef=0.0), "71.71, 64.57"),
    ("6", "1e-3", X_MOE, dict(balance_coef=1e-3), "71.65, 64.40"),
    ("6", "1e-2", X_MOE, dict(balance_coef=1e-2), "71.93, 64.59"),
    ("6", "1e-1", X_MOE, dict(balance_coef=1e-1), "71.68, 64.50"),
    ("7", "SMoE, top-1", SMOE, LEARN, "?"),
    ("7", "X-MoE, top-1", X_MOE, {}, "?"),
    ("7", "SMoE, top-2", "train_mlm/{}-router=topk-top_k=2", LEARN, "?"),
    ("7", "X-MoE, top-2", "train_mlm/{}-top_k=2", {}, "?"),
    ("xlme1", "XLM-E - TRTD", f"{XLM_E}-tlm=False", {}, "74.2, 62.7, 74.3/58.2, 67.8/49.7, 57.8/40.6, 75.1, 87.1"),
    ("xlme1", "XLM", XLM, {}, "70.1, 61.2, 59.8/44.3, 48.5/32.6, 43.6/29.1, 69.1, 80.9"),
    ("xlme1", "XLM-E", XLM_E, {}, "75.6, 63.5, 76.2/60.2, 68.3/49.8, 62.4/45.7, 76.6, 88.3"),
    ("xlme2", "XLM", XLM, {}, "?, 66.2/47.8"),
    ("xlme2", "XLM - TLM", "train_electra/{}-objective=mlm-tlm=False-relative_bias=False", {}, "?, 64.0/46.0"),
    ("xlme2", "XLM-E", XLM_E, {}, "76.6, 68.3/49.8"),
    ("xlme2", "XLM-E - TRTD", f"{XLM_E}-tlm=False", {}, "75.1, 67.8/49.7"),
    ("xlme2", "XLM-E - TRTD - gate", f"{XLM_E}-tlm=False-relative_bias=False", {}, "?, 67.4/49.2"),
    ("xlme7", "XLM", XLM, {}, "?, ?, ?, ?, ?"),
    ("xlme7", "XLM-E", XLM_E, {}, "14.9, 19.2, 13.1, 11.2, 8.8"),
    ("xlme7", "XLM-E - TRTD", f"{XLM_E}-tlm=False", {}, "16.3, 18.6, 16.3, 11.5, 9.6"),
]


def table(number: str, base: Config) -> Table:
    """A row for each encoder and task, by the constants that the preset's paper has for the task; demo: by a sample."""
    title, tasks = TITLES[number]
    defaults = {name: getattr(Config, name) for name in PRESETS[base.preset]}  # the base's preset is of another task
    paper = "sample" if base.preset == "demo" else base.preset.partition("-")[0]
    rows = []
    for table, label, encoder, change, numbers in ROWS:
        if table != number:
            continue
        run = f"out/{encoder.format(base.encoders)}"
        for task, theirs in zip(tasks, numbers.split(", ")):
            preset = f"{paper}-{task}"
            own = defaults | PRESETS[preset] | dict(preset=preset, model=run)
            rows.append(((label, task, theirs), own | change))
    return Table(title, ("encoder", "task", "paper"), rows)


TABLES = {number: partial(table, number) for number in TITLES}


def cells(result: dict) -> dict:
    """A row of any of the tables: means over languages, and what only some of them are about."""
    metrics = list(result["mean"])  # of answers f1 and em, else one alone
    main, last = metrics[0], metrics[-1]
    return {
        "F1 or accuracy": (result["mean"][main], ".1f"),
        "EM": (result["mean"].get("em"), ".1f"),
        "guess": (result["guess"][main], ".1f"),
        "by word": (result["counting"].get(main), ".1f"),
        "English": (result["languages"].get("en", {}).get(main), ".1f"),
        "English ahead by": (result["gap"].get(last), ".1f"),  # the paper's is of EM
        "English dev": (result["valid"][main], ".1f"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The model


class FineTuned(SparseModel):
    """An encoder under XLM-R's head for a kind of task: one linear layer on tokens, or two on `<s>`."""

    def __init__(self, encoder: Encoder, kind: str, labels: list[str], dropout: float):
        super().__init__()
        self.config, self.vocab_size = encoder.config, encoder.vocab_size
        self.encoder, self.kind, self.labels = encoder, kind, labels
        D, std = encoder.config.n_embd, encoder.config.init_std
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(D, D) if kind == "label" else None
        self.out = nn.Linear(D, len(labels) or 2)  # of answers, which have no labels: begins here, ends here
        for layer in filter(None, (self.dense, self.out)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, ids, real, words):
        """ids (B, T), real (S,) as in `Encoder`, words (M,) places of words in B * T -> logits, balance loss.

        Logits of tags are (M, tags), of labels (B, labels), of answers (2 B, T): where the first row's answer begins,
        where it ends, then the second row's, and so on.
        """
        h, balance = self.encoder(ids, real)  # (B, T, D)
        if self.kind == "label":
            h = self.dropout(h[:, 0])
            h = self.dropout(self.dense(h).tanh())
            return self.out(h), balance
        if self.kind == "tags":
            h = h.flatten(0, 1).index_select(0, words)
            return self.out(self.dropout(h)), balance
        logits = self.out(h).transpose(1, 2)  # (B, 2, T)
        if real is not None:
            logits = logits.masked_fill(~real_mask(ids, real).unsqueeze(1), -torch.inf)
        return logits.flatten(0, 1), balance


def build(config: Config, labels: list[str]) -> tuple[FineTuned, XLMR]:
    """A pre-trained encoder under a new head, and its tokenizer. Raises ValueError where --model is something else."""
    encoder, tokenizer = pretrained.load_encoder(config.model, dropout=config.dropout)
    if tokenizer.vocab_size != encoder.vocab_size:
        raise ValueError(f"{config.model}: its tokenizer has {tokenizer.vocab_size:,} pieces, not those of its model")
    seed_all(config.seed)
    return FineTuned(encoder, xtreme.TASKS[config.task].kind, labels, config.dropout), tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Predicting and scoring


@torch.no_grad()
def predict(model: FineTuned, examples: list[Example], config: Config, tokenizer: XLMR, context) -> list:
    """For each example its tags, its answer or its label. Processes share out batches of rows of like lengths."""
    model.eval()
    rows = make_rows(model, examples, config, tokenizer)
    longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    size, found = config.micro_size, {}  # number of a row -> a list: the tags of its words, its label, its best answer
    for first in range(context.rank * size, len(rows), context.world * size):
        numbers = longest_first[first : first + size]
        own = [rows[number] for number in numbers]
        batch = xtreme_rows.batch_of(own, tokenizer.pad)
        with context.autocast():
            logits, _ = model(*context.send_all(batch.ids, batch.real, batch.words))
        logits = logits.float().cpu()
        predicted = xtreme_rows.row_predictions(model.kind, model.labels, own, logits, config.longest_answer)
        found.update(zip(numbers, predicted))
    found = ChainMap(*context.gather(found))
    model.train()
    return xtreme_rows.by_example(model.kind, examples, rows, found)


def longest_row(model: FineTuned, config: Config) -> int:
    """T: a preset's block_size, or as many positions as the encoder has."""
    positions = model.config.block_size
    return min(config.block_size or positions, positions)


def make_rows(model: FineTuned, examples: list[Example], config: Config, tokenizer: XLMR) -> list[Row]:
    """Raises ValueError where a row would be too short for anything."""
    T = longest_row(model, config)
    if T < 8:
        raise ValueError(f"block_size = {T} leaves a row no room for a question and a text: 8 or more")
    return xtreme_rows.rows_of(model.kind, examples, tokenizer, T, min(config.stride, T // 2), model.labels)


def main_score(scores: dict[str, float]) -> float:
    """What chooses a checkpoint: accuracy or F1, the first."""
    return next(iter(scores.values()))


COUNTING = {  # kind of task: what finds its answers by counting words, and what that is called
    "tags": (xtreme_scores.tags_by_word, "each word's most frequent tag"),
    "label": (xtreme_scores.labels_by_word, "naive Bayes over words"),
}


def score_languages(run: Run, model: FineTuned, examples: Examples, config: Config, context) -> dict:
    """Scores every language, beside a guess and what counting words finds -> these, their means, and the gap: by how
    much English is ahead of the mean of the others (XLM-E table 7).

    What was predicted is kept in test-LANGUAGE.jsonl, a line an example.
    """
    kind, by_word = model.kind, None
    if kind in COUNTING:
        by_word = COUNTING[kind][0](examples.train)
    languages, guesses, counted = {}, {}, {}
    for language, own in tqdm(examples.test.items(), desc="testing", unit="language", disable=context.rank > 0):
        gold = [one.gold for one in own]
        score = partial(xtreme_scores.scores, config.task, language, gold)
        predicted = predict(model, own, config, run.tokenizer, context)
        keep(run, language, own, predicted)
        languages[language] = score(predicted)
        guesses[language] = score(xtreme_scores.guess(kind, examples.train, own))
        if by_word:
            counted[language] = score(by_word(own))
    scores = {"languages": languages, "guesses": guesses, "counted": counted}
    means = {"mean": mean_of(languages), "guess": mean_of(guesses), "counting": mean_of(counted)}
    return scores | means | {"gap": gap_of(languages)}


def keep(run: Run, language: str, examples: list[Example], predicted: list):
    lines = []
    for one, ours in zip(examples, predicted):
        record = {"id": one.id, "language": language, "gold": one.gold, "predicted": ours}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    run.write(f"test-{language}.jsonl", "".join(lines))


def gap_of(languages: dict[str, dict]) -> dict[str, float]:
    """English minus the mean of the other languages, of each metric; {} where there are not both."""
    others = {language: scores for language, scores in languages.items() if language != "en"}
    if not others or len(others) == len(languages):
        return {}
    mean = mean_of(others)
    return {metric: value - mean[metric] for metric, value in languages["en"].items()}


def mean_of(languages: dict[str, dict]) -> dict[str, float]:
    """The mean over languages of each metric; {} where there are no languages."""
    values = {}
    for scores in languages.values():
        for metric, value in scores.items():
            values.setdefault(metric, []).append(value)
    return {metric: fmean(own) for metric, own in values.items()}


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Fine-tunes (or goes on) on English, and scores every language -> the result, which is also in result.json."""
    with clear_errors():
        examples, model, data = set_up(config)
        steps = config.epochs * data.steps_per_epoch
        run = Run(config, PRESETS, context, data, total=steps, every=data.steps_per_epoch)
    if run.result:
        return run.result
    with clear_errors():
        model = context.place(model)
        if config.frozen:  # routers and experts (X-MoE 3.3)
            for moe in model.moe_layers:
                moe.requires_grad_(False)
        context.say(f"{run.name}: {describe_data(config, examples, data, model)}")
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        watches = list(map(measures.Load, model.moe_layers))
        loads = run.kept.setdefault("loads", [])  # [i][layer][expert]: tokens of the i-th 100 steps
        for watch, total in zip(watches, run.kept.get("pending", [])):  # of the steps since the last full 100
            watch.total.copy_(total * (context.rank == 0))  # one process goes on with the sums of all
        run.kept["pending"] = lambda: [context.sum(watch.total) for watch in watches]
        run.resume(model, optimizer, flops.matrix_flops(model)["total"])
    for step in run.steps():
        set_learning_rate(optimizer, linear(step, steps, config.warmup, config.learning_rate))
        for micro in run.micros:
            seed_all(config.seed, 1 + step, micro)  # all that is random: so a resumed run is the same run
            forward.require_backward_grad_sync = micro == run.micros[-1]  # processes exchange gradients once
            ids, real, words, targets = context.send_all(*data.batch(step, micro))
            with context.autocast():
                logits, balance = forward(ids, real, words)
            loss = cross_entropy(logits, targets)
            ((loss + config.balance_coef * balance) / len(run.micros)).backward()  # X-MoE eq. 10
            run.add(loss, tokens=ids.numel() if real is None else len(real))
        parallel.clip_grad_norm_(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if not config.frozen:
            model.after_step()
        if (step + 1) % 100 == 0:
            loads.append([watch.take(context.sum) for watch in watches])
        if run.due(step + 1):
            predicted = predict(model, examples.valid, config, data.tokenizer, context)
            scores = score_english(config, examples, predicted)
            best = run.kept.get("best")
            if best is None or main_score(scores) > main_score(best["scores"]):
                weights = {name: x.to("cpu", copy=True) for name, x in model.state_dict().items()}
                run.kept["best"] = {"step": step + 1, "scores": scores, "model": weights}
            total = float(sum(p.detach().sum() for p in model.parameters()))  # not finite if the last update broke one
            run.save(step + 1, scores, total, f"English development: {describe(scores)}")

    best = run.kept["best"]
    model.load_state_dict(best["model"])
    run.save_model("model.pt", model, best["step"], labels=model.labels)
    scores = score_languages(run, model, examples, config, context)
    scores |= {"valid": best["scores"], "step": best["step"], "loads": loads}
    return run.finish(scores | {"longest_row": longest_row(model, config)})


def set_up(config: Config) -> tuple[Examples, FineTuned, TaskData]:
    """What a run starts from. Raises ValueError, OSError or ImportError where something is missing."""
    limits = config.train_examples, config.test_examples
    examples = xtreme.read_examples(config.task, config.source, config.train_source, *limits)
    for note in examples.notes:
        warn(note)
    model, tokenizer = build(config, examples.labels)
    T = longest_row(model, config)
    if "block_size" in said(config, PRESETS) and T < (config.block_size or 0):
        raise ValueError(f"{config.model} has {T} positions, fewer than --block_size {config.block_size}")
    rows = make_rows(model, examples.train, config, tokenizer)
    rows = [row for row in rows if set(row.targets) != {xtreme_rows.UNKNOWN}]
    if not rows:
        raise ValueError(f"no training example of {config.task} has a label that is known")
    start = hash_of(model, examples)
    return examples, model, TaskData(rows, tokenizer, config.batch_size, config.micro_size, config.seed, start)


def score_english(config: Config, examples: Examples, predicted: list) -> dict[str, float]:
    """Scores of predictions for the development set, which choose the checkpoint."""
    gold = [one.gold for one in examples.valid]
    return xtreme_scores.scores(config.task, "en", gold, predicted)


def hash_of(model: nn.Module, examples: Examples) -> str:
    """Of the weights and of what is scored: a run does not go on where a folder now holds others."""
    found = hashlib.sha256(repr((examples.valid, examples.test)).encode("utf-8", "surrogatepass"))
    for x in model.state_dict().values():
        found.update(x.flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def describe_data(config: Config, examples: Examples, data: TaskData, model: FineTuned) -> str:
    guess = xtreme_scores.guess(model.kind, examples.train, examples.valid)
    reached = describe(score_english(config, examples, guess))
    return (
        f"{len(data.rows):,} rows of {len(examples.train):,} training examples, up to {longest_row(model, config)} "
        f"tokens each; {config.epochs * data.steps_per_epoch:,} steps; {len(examples.valid):,} development examples, "
        f"of which a guess reaches {reached}; {len(examples.test)} languages to score"
    )


def describe(scores: dict[str, float]) -> str:
    return ", ".join(f"{metric} {value:.1f}" for metric, value in scores.items())


def report(config: Config, result: dict) -> str:
    """A finished result in words: a table of the languages, and by how much English is ahead."""
    kind = xtreme.TASKS[config.task].kind
    what = "a smoke test, no task of XTREME's; " if config.task == "apps" else ""
    by_word = COUNTING[kind][1] if kind in COUNTING else ""
    lines = [
        f"\n{result['name']}: {what}weights of step {result['step']}, best in English development",
        f"{'':10}{'score':22}{'guess without a model':24}{by_word}".rstrip(),
    ]
    for language, scores in result["languages"].items():
        lines.append(line_of(language, scores, result["guesses"][language], result["counted"].get(language, {})))
    lines.append(line_of("mean", result["mean"], result["guess"], result["counting"]))
    if result["gap"]:
        lines.append(f"English is ahead of the mean of the others by {describe(result['gap'])}")
    return "\n".join(lines)


def line_of(language: str, scores: dict, guess: dict, counted: dict) -> str:
    return f"{language:10}{describe(scores):22}{describe(guess):24}{describe(counted)}".rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# What else the command line can ask for


def search(config: Config, context):
    """Runs every combination of the values that the paper searched, and orders them by English development."""
    values = SEARCHED[config.preset]
    with clear_errors():
        if not values or config.table or config.seeds > 1:
            raise ValueError(f"--search is for one preset of a paper and one seed, not for preset {config.preset}")
        given = said(config, PRESETS).keys() & values.keys()
        if given:
            raise ValueError(f"--search tries every --{min(given)} of the paper: leave it out")
    found = []
    for combination in product(*values.values()):
        change = dict(zip(values, combination))
        result = train(replace(config, **change), context)
        row = [*combination, describe(result["valid"]), describe(result["mean"])]
        found.append((main_score(result["valid"]), row))
    found.sort(key=itemgetter(0), reverse=True)
    rows = [row for _, row in found]
    if context.rank == 0:
        headers = [*values, "English development", "mean over languages"]
        print(f"\n{config.preset}, the best first\n\n{markdown_table(headers, rows)}")


def predict_file(config: Config, context):
    """Prints what a fine-tuned model makes of a file, in rows such as it was trained on.

    Of a task with tags: a sentence of words and spaces a line -> `word TAB tag` lines, a blank one behind a sentence.
    With answers: `question TAB text` -> the answer. With labels: `sentence TAB sentence`, of apps one -> the label.
    """
    with clear_errors():
        refuse_others(config, PRESETS, "predict", {"model", "device", "dtype"})
        constants, model, tokenizer = load_fine_tuned(Path(config.model))
        examples = list(read_unlabelled(config.predict, constants.task))
    model = context.place(model)
    for example, found in zip(examples, predict(model, examples, constants, tokenizer, context)):
        if model.kind == "tags":
            found = "".join(f"{word}\t{tag}\n" for word, tag in zip(example.texts, found))
        if context.rank == 0:
            print(found)


def load_fine_tuned(folder: Path) -> tuple[Config, FineTuned, XLMR]:
    """A finished run of this script: its constants, its best weights, its tokenizer. Raises ValueError for others."""
    _, state = newest(folder, ("model.pt",))
    if state.get("class") != FineTuned.__name__:
        raise ValueError(f"{folder} holds no fine-tuned model: give a folder under out/finetune_xtreme")
    known = state["identity"].keys() & vars(Config()).keys()
    config = Config(**{name: state["identity"][name] for name in known})
    encoder = Encoder(SimpleNamespace(**state["constants"]), state["vocab_size"])
    model = FineTuned(encoder, xtreme.TASKS[config.task].kind, state["labels"], dropout=0.0)
    model.load_state_dict(state["model"])
    return config, model, load_tokenizer(folder)


def read_unlabelled(file: str, task: str) -> Iterator[Example]:
    """An example a line. Raises ValueError for a line with another number of texts than the task has."""
    kind, wanted = xtreme.TASKS[task].kind, 1 if task == "apps" else 2
    for number, line in enumerate(read_lines(Path(file)), 1):
        if kind == "tags":
            words = line.split()
            yield Example(str(number), tuple(words), [""] * len(words))
            continue
        texts = line.rstrip("\r\n").split("\t")
        if len(texts) != wanted:
            raise ValueError(f"{file}, line {number}: {len(texts)} texts between TABs, not {wanted}")
        yield Example(str(number), tuple(texts), [] if kind == "answer" else "")


def main():
    config, context = start(Config, PRESETS)
    if config.predict is not None:
        predict_file(config, context)
    elif config.search:
        search(config, context)
    else:
        carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
