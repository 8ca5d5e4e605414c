"""XTREME: fine-tune an encoder on English only, and score it in every language (tables of X-MoE and XLM-E).

    python finetune_xtreme.py                              the demo: find names, code and numbers in ciphered text,
                                                           with the encoder of `python train_electra.py`
    python finetune_xtreme.py --random_weights true        the same without pre-training
    python finetune_xtreme.py --preset ciphers-spans --model out/train_mlm/demo     another task, another encoder
    python finetune_xtreme.py --table xlme2                the encoders of a table, each on the three tasks in ciphers
    python finetune_xtreme.py --preset xlme-mlqa --model /models/xlm-roberta-base    a task with a paper's constants
    python finetune_xtreme.py --table 1 --preset xmoe-xnli --source XTREME_FOLDER    X-MoE's table 1 on XTREME itself

The checkpoint with the best English development score is scored in every language, next to two trivial baselines. A
run and its predictions are in out/finetune_xtreme/NAME: files such as udpos/test-de.tsv and xquad/test-de.json, in the
format of XTREME's evaluate.py and leaderboard, also for test sets without labels. The same command resumes a stopped
run, and if only test sets have changed, predicts them without training. `--help` lists every constant.
"""

import hashlib
from collections import ChainMap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import engine  # isort: skip  # noqa: F401  before torch
import torch
from torch import nn

from data import xtreme_rows
from data.files import progress
from data.xtreme import LABORATORY, TASKS, Example, Examples, read_examples, submission
from data.xtreme_rows import TaskData
from engine import parallel, pretrained
from engine.device import clear_errors, seed_all, warn
from engine.files import newest
from engine.optim import adamw, clip_gradients, linear, set_learning_rate
from engine.run import Run
from engine.table import Table, carry_out, markdown_table, seeds_of, start, table_of
from metrics import flops
from metrics.routing import count_choices
from metrics.scores import COUNTING, gap, guess, mean, score_task
from model import Encoder, SparseModel, cross_entropy, nonpad_mask

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or pass --name value


@dataclass
class Config:
    preset: str = "demo"  # demo; a paper and a task, such as xmoe-xnli; or a task in ciphers, such as ciphers-spans
    table: str | None = None  # run every row of X-MoE's table 1, 3, 5, 6 or 7, or XLM-E's xlme1, xlme2 or xlme7
    seeds: int = 1  # number of seeds, of the encoders too in tables; prints mean and deviation
    # the task, its data and the encoder
    task: Literal["pos", "ner", "xquad", "mlqa", "tydiqa", "xnli", "pawsx", "tags", "pairs", "spans"] = "tags"
    model: str = "out/train_electra/demo"  # the encoder: folder of a run, or of XLM-R in Hugging Face's format
    random_weights: bool = False  # a new encoder of the same shape, drawn from the seed: the score without pre-training
    encoders: str = "demo"  # in tables: preset of the runs of train_mlm.py or train_electra.py to fine-tune
    source: str | None = None  # folder with the task's files, or with XTREME's folders of all tasks; None: the hub
    train_examples: int | None = None  # use at most this many training examples
    test_examples: int | None = None  # at most this many per language and of the development set; submissions need all
    # training
    frozen: bool = True  # freeze routers and experts (X-MoE 3.3); the balance loss still trains the other weights
    balance_coef: float = 0.01  # weight of the balance loss of sparse layers (alpha)
    epochs: int = 8  # passes through the training rows
    batch_size: int = 16  # rows per step, over all processes and micro-batches
    micro_size: int = 16  # rows of one forward pass
    block_size: int | None = None  # maximum tokens per row; None: the encoder's
    stride: int = 128  # tokens between the starts of two windows of a long text; at most half a row
    longest_answer: int = 30  # maximum tokens per answer
    learning_rate: float = 2e-3  # learning rate at the end of the warm-up, its peak
    warmup: float = 0.1  # share of steps for linear warm-up; then linear decay to 0
    beta2: float = 0.999  # Adam's beta2, the decay rate of its average of squared gradients
    eps: float = 1e-8  # Adam's epsilon, added to the denominator of its update
    weight_decay: float = 0.0  # weight decay of matrices and embeddings
    grad_clip: float = 1.0  # clip the gradient to this norm; 0: no clipping
    dropout: float = 0.0  # dropout in the encoder, and in the head for tags and labels
    seed: int = 0  # seed of the head's weights, data order and dropout
    log_every: int = 10  # show the loss every this many steps
    # where and how
    out_dir: str = "out/finetune_xtreme"  # folder of all runs
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "float32"  # auto: bfloat16 if it is fast
    compile: bool | None = None  # use torch.compile; None: for bfloat16 on a GPU
    resume: bool = True  # resume from the newest checkpoint; false: start over

    def unread(self) -> set[str]:
        """Constants that other constants make unused, see engine/config.py."""
        names = set() if TASKS[self.task].kind == "answer" else {"stride", "longest_answer"}
        if self.table is None:
            names |= {"encoders", "source"} if self.task in LABORATORY else {"encoders"}
        return names


# X-MoE appendix C and XLM-E table 11. Where the paper searched several values, we take the middle one, and a comment
# lists them. X-MoE searched balance_coef: 0, 1e-3, 1e-2, 1e-1. The papers do not state clipping, dropout, Adam's
# constants and lengths: these are from XTREME's scripts. `ciphers` are tasks for encoders of the demos' size, which
# need a higher learning rate.
COMMON = dict(batch_size=32, micro_size=8, epochs=10, dropout=0.1, dtype="auto")
CIPHERS = dict(batch_size=16, micro_size=16, dropout=0.0, dtype="float32")
CONSTANTS = {
    "xmoe-pos": dict(batch_size=8, learning_rate=2e-5, balance_coef=1e-2),  # 1e-5, 2e-5, 3e-5
    "xmoe-ner": dict(batch_size=8, learning_rate=7e-6, balance_coef=1e-2),  # 5e-6 to 9e-6
    "xmoe-xquad": dict(learning_rate=3e-5, epochs=3, balance_coef=1e-2),  # 2e-5, 3e-5, 4e-5; 2, 3, 4
    "xmoe-mlqa": dict(learning_rate=3e-5, epochs=3, balance_coef=1e-2),  # 2e-5, 3e-5, 4e-5; 2, 3, 4
    "xmoe-tydiqa": dict(learning_rate=3e-5, epochs=20, balance_coef=1e-2),  # 2e-5, 3e-5, 4e-5; 10, 20, 40
    "xmoe-xnli": dict(learning_rate=2e-5, epochs=5, warmup=0.2, weight_decay=0.01, balance_coef=1e-2),
    "xmoe-pawsx": dict(learning_rate=2e-5, balance_coef=1e-2),  # 1e-5, 2e-5
    "xlme-pos": dict(batch_size=16, learning_rate=2e-5),  # 8, 16, 32; 1e-5, 2e-5, 3e-5
    "xlme-ner": dict(batch_size=8, learning_rate=7e-6),  # 5e-6 to 9e-6
    "xlme-xquad": dict(learning_rate=3e-5, epochs=4),  # 2e-5, 3e-5, 4e-5
    "xlme-mlqa": dict(learning_rate=3e-5, epochs=3),  # 2e-5, 3e-5, 4e-5; 2, 3, 4
    "xlme-tydiqa": dict(learning_rate=3e-5, epochs=20),  # 2e-5, 3e-5, 4e-5; 10, 20, 40
    "xlme-xnli": dict(learning_rate=7e-6, warmup=12_500 / 122_720),  # 5e-6 to 8e-6
    "xlme-pawsx": dict(learning_rate=1e-5),  # 8e-6, 9e-6, 1e-5, 2e-5
    "ciphers-tags": CIPHERS | dict(epochs=8, learning_rate=2e-3),  # as the demo
    "ciphers-pairs": CIPHERS | dict(epochs=4, learning_rate=3e-4),
    "ciphers-spans": CIPHERS | dict(epochs=4, learning_rate=2e-3),
}


def preset(name: str) -> dict:
    """The constants of `paper-task`. XTREME's scripts use rows of 384 tokens for questions, else of 128."""
    task = name.partition("-")[2]
    longest = 384 if TASKS[task].kind == "answer" else 128
    return COMMON | CONSTANTS[name] | {"task": task, "block_size": longest}


PRESETS = {"demo": {}} | {name: preset(name) for name in CONSTANTS}

# ---------------------------------------------------------------------------------------------------------------------
# Tables: a row for each encoder and task, beside the paper's numbers (F1/EM of answers)

ALL = ("pos", "ner", "xquad", "mlqa", "tydiqa", "xnli", "pawsx")
# Encoders: folders of runs under out/. {} is the preset; the changed constants follow.
DENSE = "train_mlm/{}-router=dense"
SMOE = "train_mlm/{}-router=switch-gate=softmax"
SMOE_SIGMOID = "train_mlm/{}-router=switch-gate=sigmoid"
X_MOE = "train_mlm/{}-gate=softmax"
X_MOE_SIGMOID = "train_mlm/{}-gate=sigmoid"
XLM = "train_electra/{}-objective=mlm-masks=bert-relative_bias=False"
XLM_E = "train_electra/{}"
ELECTRA_MASKS = "train_electra/{}-masks=electra"
SENTENCES = "train_electra/{}-tlm=False-masks=electra"
SIZES = {  # by preset: E in train_mlm.py; in train_electra.py the steps of XLM that take the FLOPs of XLM-E
    "train_mlm": {"demo": 16, "base": 32},
    "train_electra": {"demo": 7812, "captions": 25_382, "base": 157_500, "large": 150_375, "xl": 144_375},
}
# What a preset already sets, so the names of its runs omit it.
DEFAULTS = {"demo": "-gate=sigmoid"} | dict.fromkeys(("base", "large", "xl"), "-masks=electra")
LEARN = dict(frozen=False)
TITLES = {  # table -> title, tasks
    "1": ("X-MoE table 1: XTREME", ALL),
    "3": ("X-MoE table 3: reduction, L2 norm, frozen routing; sigmoid gate", ("xnli", "mlqa")),
    "5": ("X-MoE table 5: the routing dimension, sigmoid gate, N experts", ("xnli", "mlqa")),
    "6": ("X-MoE table 6: the balance loss in fine-tuning (the paper: validation data)", ("xnli", "mlqa")),
    "7": ("X-MoE table 7: one expert a token, and two", ("xnli",)),
    "xlme1": ("XLM-E table 1: XTREME", ALL),
    "xlme2": ("XLM-E table 2: ablation", ("xnli", "mlqa")),
    "xlme7": ("XLM-E table 7: English minus the mean of the other languages (EM of answers)", ALL[2:]),
}
# Table, label, encoder, changed constants of fine-tuning, the paper's numbers.
ROWS = [
    ("1", "dense", DENSE, {}, "70.0, 61.1, 67.3/51.1, 58.7/41.1, 42.1/28.3, 70.1, 84.1"),
    ("1", "SMoE, softmax", SMOE, LEARN, "70.1, 60.9, 71.3/55.2, 62.8/44.8, 50.9/34.5, 71.5, 84.6"),
    ("1", "X-MoE, softmax", X_MOE, {}, "70.8, 63.2, 72.4/56.2, 64.5/46.3, 53.7/38.1, 72.0, 85.2"),
    ("1", "SMoE, sigmoid", SMOE_SIGMOID, LEARN, "70.6, 61.2, 71.5/55.7, 63.2/45.3, 50.1/35.1, 71.2, 85.1"),
    ("1", "X-MoE, sigmoid", X_MOE_SIGMOID, {}, "71.1, 62.7, 72.3/56.3, 64.3/46.0, 51.5/36.6, 72.2, 85.2"),
    ("3", "reduction, norm, frozen", X_MOE_SIGMOID, {}, "72.2, 64.3/46.0"),
    ("3", "norm, frozen", X_MOE_SIGMOID + "-routing_dim=0", {}, "71.5, 63.4/45.2"),
    ("3", "reduction, frozen", SMOE_SIGMOID + "-routing_dim={E/2}", {}, "71.4, 63.0/45.2"),
    ("3", "reduction, norm", X_MOE_SIGMOID, LEARN, "71.7, 63.9/45.8"),
    ("3", "frozen", SMOE_SIGMOID, {}, "71.6, 63.6/45.5"),
    ("3", "none", SMOE_SIGMOID, LEARN, "71.2, 63.2/45.3"),
    ("5", "N / 4", X_MOE_SIGMOID + "-routing_dim={E/4}", {}, "71.4, 64.3/46.4"),
    ("5", "N / 2", X_MOE_SIGMOID, {}, "72.2, 64.3/46.0"),
    ("5", "N", X_MOE_SIGMOID + "-routing_dim={E}", {}, "71.7, 63.8/45.9"),
    ("5", "2 N", X_MOE_SIGMOID + "-routing_dim={2E}", {}, "71.7, 62.7/44.8"),
    ("5", "4 N", X_MOE_SIGMOID + "-routing_dim={4E}", {}, "71.2, 63.1/45.0"),
    ("6", "0", X_MOE, dict(balance_coef=0.0), "71.71, 64.57"),
    ("6", "1e-3", X_MOE, dict(balance_coef=1e-3), "71.65, 64.40"),
    ("6", "1e-2", X_MOE, dict(balance_coef=1e-2), "71.93, 64.59"),
    ("6", "1e-1", X_MOE, dict(balance_coef=1e-1), "71.68, 64.50"),
    ("7", "SMoE, top-1", SMOE, LEARN, "?"),
    ("7", "X-MoE, top-1", X_MOE, {}, "?"),
    ("7", "SMoE, top-2", SMOE.replace("switch", "topk") + "-top_k=2", LEARN, "?"),
    ("7", "X-MoE, top-2", X_MOE + "-top_k=2", {}, "?"),
    ("xlme1", "XLM-E - TRTD", SENTENCES, {}, "74.2, 62.7, 74.3/58.2, 67.8/49.7, 57.8/40.6, 75.1, 87.1"),
    ("xlme1", "XLM (in the paper, Hu et al.'s)", XLM, {}, "70.1, 61.2, 59.8/44.3, 48.5/32.6, 43.6/29.1, 69.1, 80.9"),
    ("xlme1", "XLM-E", XLM_E, {}, "75.6, 63.5, 76.2/60.2, 68.3/49.8, 62.4/45.7, 76.6, 88.3"),
    ("xlme2", "XLM", XLM, {}, "?, 66.2/47.8"),
    ("xlme2", "XLM, as many FLOPs", XLM + "-steps={steps}", {}, "?, ?"),
    ("xlme2", "XLM - TLM", XLM.replace("mlm", "mlm-tlm=False"), {}, "?, 64.0/46.0"),
    ("xlme2", "XLM-E", XLM_E, {}, "76.6, 68.3/49.8"),
    ("xlme2", "XLM-E, masks as ELECTRA's", ELECTRA_MASKS, {}, "?, ?"),
    ("xlme2", "XLM-E - TRTD", SENTENCES, {}, "75.1, 67.8/49.7"),
    ("xlme2", "XLM-E - TRTD - bias", SENTENCES + "-relative_bias=False", {}, "?, 67.4/49.2"),
    ("xlme2", "random weights", XLM_E, dict(random_weights=True), "?, ?"),
    ("xlme7", "XLM", XLM, {}, "?, ?, ?, ?, ?"),
    ("xlme7", "XLM-E", XLM_E, {}, "14.9, 19.2, 13.1, 11.2, 8.8"),
    ("xlme7", "XLM-E, masks as ELECTRA's", ELECTRA_MASKS, {}, "?, ?, ?, ?, ?"),
    ("xlme7", "XLM-E - TRTD", SENTENCES, {}, "16.3, 18.6, 16.3, 11.5, 9.6"),
]


def encoder_path(encoder: str, preset: str) -> str:
    """The folder of a row's encoder with seed 0."""
    sizes = SIZES[encoder.partition("/")[0]]
    if preset not in sizes:
        raise ValueError(f"encoders must be one of {', '.join(sizes)}, not {preset!r}")
    steps = E = sizes[preset]
    name = encoder.replace(DEFAULTS.get(preset, ""), "")
    fields = {"E/4": E // 4, "E/2": E // 2, "E": E, "2E": 2 * E, "4E": 4 * E}
    return "out/" + name.format(preset, steps=steps, **fields)


def encoder_of(config: Config) -> Path:
    """The folder of the encoder. In a table, each seed has the encoder of that seed, with `-seed=` in its name."""
    folder = Path(config.model)
    preset, *options = folder.name.split("-")
    if config.table and config.seed:
        options.insert(0, f"seed={config.seed}")
        folder = folder.with_name("-".join([preset, *options]))
    script = folder.parent.name
    if preset in SIZES.get(script, {}) and not folder.exists() and all("=" in option for option in options):
        options = "".join(f" --{option.replace('=', ' ')}" for option in [f"preset={preset}", *options])
        raise ValueError(f"{folder} does not exist: python {script}.py{options} trains it")
    return folder


def table(number: str, base: Config) -> Table:
    """A row for each encoder and task, with the paper's constants for the task; the demo's tasks are in ciphers."""
    title, tasks = TITLES[number]
    # `base` has the constants of one task: rows reset them to the defaults.
    reset = {name: getattr(Config, name) for name in PRESETS[base.preset]}
    paper = base.preset.partition("-")[0].replace("demo", "ciphers")
    if paper == "ciphers":
        if base.source:
            raise ValueError("tasks in ciphers need no source: for XTREME's add a paper's --preset, such as xmoe-xnli")
        title, tasks = f"{title}, in ciphers", tuple(LABORATORY)
    rows = []
    for _, label, encoder, change, numbers in [row for row in ROWS if row[0] == number]:
        model = encoder_path(encoder, base.encoders)
        scores = [""] * len(tasks) if paper == "ciphers" else numbers.split(", ")
        for task, score in zip(tasks, scores):
            name = f"{paper}-{task}"
            constants = reset | PRESETS[name] | dict(preset=name, model=model) | change
            del constants["dtype"]  # --dtype decides
            rows.append(((label, task, score), constants))
    return Table(title, ("encoder", "task", "paper"), rows, average if tasks == ALL else None)


def average(rows: list[tuple]) -> tuple:
    """The papers' column Avg: the mean over an encoder's tasks, each the mean of its F1 and EM if it has both."""
    (encoder, *_), _ = rows[0]
    paper_scores = [fmean(map(float, score.split("/"))) for (*_, score), _ in rows]
    seeds = []
    for tasks in zip(*(seeds for _, seeds in rows)):
        pairs = [(task["F1 or accuracy"][0], task["EM"][0]) for task in tasks]
        scores = [[score for score in pair if score is not None] for pair in pairs]
        score = fmean(map(fmean, scores)) if all(scores) else None  # None: a test set without labels
        seeds.append(dict.fromkeys(tasks[0], (None, "")) | {"F1 or accuracy": (score, ".1f")})
    return (encoder, f"avg of {len(rows)}", f"{fmean(paper_scores):.1f}"), seeds


TABLES = {number: partial(table, number) for number in TITLES}


def cells(result: dict) -> dict:
    """The cells of a row: means over languages, and columns that only some tables show."""
    metrics = list(result["valid"])  # f1 and em of answers, else a single metric
    main, last = metrics[0], metrics[-1]
    numbers = {
        "F1 or accuracy": result["mean"].get(main),
        "EM": result["mean"].get("em"),
        "guess": result["guess"].get(main),
        "by word": result["counting"].get(main),
        "English": result["languages"].get("en", {}).get(main),
        "English ahead by": result["gap"].get(last),  # EM in the paper
        "English dev": result["valid"][main],
    }
    return {name: (number, ".1f") for name, number in numbers.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The model


class FineTuned(SparseModel):
    """An encoder with XLM-R's head for a kind of task: one linear layer on tokens, or two on `<s>`."""

    def __init__(self, encoder: Encoder, kind: str, labels: list[str], dropout: float):
        super().__init__()
        self.config, self.vocab_size = encoder.config, encoder.vocab_size
        self.encoder, self.kind, self.labels = encoder, kind, labels
        D, std = encoder.config.n_embd, encoder.config.init_std
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(D, D) if kind == "label" else None
        self.out = nn.Linear(D, len(labels) or 2)  # answers have no labels, but 2 logits: start, end
        for layer in filter(None, (self.dense, self.out)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, ids, nonpad, words):
        """ids (B, T), nonpad (S,) as in `Encoder`, words (M,) flat indices of words -> logits, routers' losses.

        The logits are (M, tags), (B, labels), or for answers (2 B, T): start and end in the first row, and so on.
        """
        h, router_loss = self.encoder(ids, nonpad)  # (B, T, D)
        if self.kind == "label":
            h = self.dense(self.dropout(h[:, 0])).tanh()
            return self.out(self.dropout(h)), router_loss
        if self.kind == "tags":
            h = h.flatten(0, 1).index_select(0, words)
            return self.out(self.dropout(h)), router_loss
        logits = self.out(h).transpose(1, 2)  # (B, 2, T)
        if nonpad is not None:
            logits = logits.masked_fill(~nonpad_mask(ids, nonpad).unsqueeze(1), -torch.inf)
        return logits.flatten(0, 1), router_loss


# ---------------------------------------------------------------------------------------------------------------------
# Predicting and scoring


@torch.no_grad()
def predict(model: FineTuned, examples: list[Example], config: Config, tokenizer, context) -> list:
    """-> tags, answer or label of each example. Batches of rows of similar length are distributed over processes."""
    model.eval()
    rows = xtreme_rows.rows_of(model.kind, examples, tokenizer, model.longest_row, config.stride, model.labels)
    size = config.micro_size
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    predictions = {}  # index of a row -> a list: the tags of its words, its label or its best answer
    for first in progress(range(context.rank * size, len(rows), context.world * size), "predicting"):
        indices = longest_first[first : first + size]
        batch_rows = [rows[i] for i in indices]
        batch = xtreme_rows.batch_of(batch_rows, tokenizer.pad)
        with context.autocast(), model.no_limit():  # a prediction does not depend on other rows of its batch
            logits, _ = model(*context.send_all(batch.ids, batch.nonpad, batch.words))
        logits = logits.float().cpu()
        predicted = xtreme_rows.row_predictions(model.kind, model.labels, batch_rows, logits, config.longest_answer)
        predictions.update(zip(indices, predicted))
    predictions = ChainMap(*context.gather(predictions))
    model.train()
    return xtreme_rows.by_example(model.kind, examples, rows, predictions)


COLUMNS = {"languages": "mean", "guesses": "guess", "counted": "counting"}  # scores per language -> their mean


def score_languages(run: Run, model: FineTuned, examples: Examples, config: Config, context) -> dict:
    """Scores every language -> scores of the model, of a guess and of counting words, their means, and the gap.

    Writes predictions in XTREME's format, also for test sets without labels, which are not scored.
    """
    count = COUNTING.get(config.task) or COUNTING.get(model.kind)
    by_word = count(examples.train) if count else None
    result = {name: {} for name in COLUMNS} | {"unlabelled": []}
    for language, test in examples.test.items():
        predicted = predict(model, test, config, run.tokenizer, context)
        run.write(*submission(config.task, language, test, predicted))
        gold = [example.gold for example in test]
        if None in gold:
            result["unlabelled"].append(language)
            continue
        score = partial(score_task, config.task, language, gold)
        result["languages"][language] = score(predicted)
        result["guesses"][language] = score(guess(model.kind, examples.train, test))
        if by_word:
            result["counted"][language] = score(by_word(test))
    means = {name: mean(result[kind].values()) for kind, name in COLUMNS.items()}
    return result | means | {"gap": gap(result["languages"])}


# ---------------------------------------------------------------------------------------------------------------------
# One run


def train(config: Config, context) -> dict:
    """Fine-tunes on English, or resumes, and scores every language -> the result, also in result.json."""
    with clear_errors():
        examples, model, data = set_up(config)
        epoch = data.steps_per_epoch
        steps = config.epochs * epoch
        run = Run(config, PRESETS, context, data, total=steps, every=epoch)
        tested = hashlib.sha256(repr(examples.test).encode("utf-8", "surrogatepass")).hexdigest()
        if run.result.get("tested") == tested:
            return run.result
        if run.result:
            context.say(f"{run.name}: scores other test examples, without training")
            run.checkpoint_name, run.checkpoint = newest(run.folder)
            run.extra = run.checkpoint.get("extra", {})
        model = context.place(model)
        if config.frozen:  # routers and experts (X-MoE 3.3)
            for moe in model.moe_layers:
                moe.requires_grad_(False)
        limits = f"{len(data.rows):,} rows of at most {model.longest_row} tokens, {steps:,} steps"
        context.say(f"{run.name}: {limits}; {len(examples.valid):,} development examples")
        forward = parallel.wrap(model, config, context)
        optimizer = adamw(model, config)
        # loads[i, l, e]: number of tokens in steps 100 i to 100 i + 99 whose first choice in layer l is expert e.
        experts = max((moe.router.E for moe in model.moe_layers), default=0)
        zeros = torch.zeros(1 + steps // 100, len(model.moe_layers), experts, dtype=torch.int64)
        run.extra["loads"] = loads = run.extra.get("loads", zeros).to(context.device)
        counts = torch.zeros_like(loads[0])  # of this step, on this process
        for moe, layer_counts in zip(model.moe_layers, counts):
            count_choices(moe, layer_counts)
        run.resume(model, optimizer, flops.matrix_flops(model))

    for step in run.steps():
        set_learning_rate(optimizer, linear(step, steps, config.warmup, config.learning_rate))
        batches = [data.batch(step, micro) for micro in run.micros]
        labelled = [int((batch.targets != xtreme_rows.UNKNOWN).sum()) for batch in batches]
        predicted = context.mean(sum(labelled)) or 1.0
        for micro, batch, count in zip(run.micros, batches, labelled):
            seed_all(config.seed, 1 + step, micro)  # seeds all randomness, so a resumed run gives the same result
            forward.require_backward_grad_sync = micro == run.micros[-1]  # processes exchange gradients once
            ids, nonpad, words, targets = context.send_all(*batch)
            with context.autocast():
                logits, router_loss = forward(ids, nonpad, words)
            loss = cross_entropy(logits, targets)
            share = count / predicted  # a step's loss is the mean over all its targets
            (share * (loss + router_loss)).backward()  # X-MoE eq. 10
            run.add(share * loss, tokens=ids.numel() if nonpad is None else len(nonpad))
        clip_gradients(model, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if not config.frozen:
            model.after_step(context.sum)  # restores the norms of embeddings on a hypersphere
        loads[step // 100] += context.sum(counts)
        counts.zero_()
        if run.due(step + 1):
            predicted = predict(model, examples.valid, config, data.tokenizer, context)
            scores = score_task(config.task, "en", [example.gold for example in examples.valid], predicted)
            [metric, *_] = scores  # accuracy or F1 selects the checkpoint
            best = run.extra.get("best")
            if best is None or scores[metric] > best["scores"][metric]:
                weights = {name: x.to("cpu", copy=True) for name, x in model.state_dict().items()}
                run.extra["best"] = {"step": step + 1, "scores": scores, "model": weights}
            run.save(step + 1, scores, f"English development: {describe(scores)}")

    best = run.extra["best"]
    model.load_state_dict(best["model"])
    run.save_model("model.pt", model, best["step"], kind=model.kind, labels=model.labels)  # for pretrained.read
    facts = {"valid": best["scores"], "step": best["step"], "loads": loads[: steps // 100].tolist(), "tested": tested}
    return run.finish(score_languages(run, model, examples, config, context) | facts)


def set_up(config: Config) -> tuple[Examples, FineTuned, TaskData]:
    """-> examples, model and training data. Raises ValueError, OSError or ImportError if something is missing."""
    changes = {"dropout": config.dropout, "balance_coef": config.balance_coef, "recompute": False}
    encoder, tokenizer = pretrained.load_encoder(encoder_of(config), **changes)
    examples = read_examples(config.task, config.source, config.train_examples, config.test_examples)
    for note in examples.notes:
        warn(note)
    seed_all(config.seed)
    if config.random_weights:
        encoder = Encoder(encoder.config, encoder.vocab_size)
    model = FineTuned(encoder, TASKS[config.task].kind, examples.labels, config.dropout)
    longest = encoder.config.block_size
    model.longest_row = min(config.block_size or longest, longest)  # tokens
    rows = xtreme_rows.rows_of(model.kind, examples.train, tokenizer, model.longest_row, config.stride, model.labels)
    if config.task in LABORATORY and tokenizer.unk in rows[0].ids:
        raise ValueError(f"{config.model} does not know the ciphers' characters: train it with --data ciphers")
    rows = [row for row in rows if set(row.targets) != {xtreme_rows.UNKNOWN}]
    if not rows:
        raise ValueError(f"no training example of {config.task} has a known label")
    # Other weights, training or development examples make a separate run.
    checksum = hashlib.sha256(repr(examples.valid).encode("utf-8", "surrogatepass"))
    for x in model.state_dict().values():
        checksum.update(x.flatten().view(torch.uint8).numpy())
    data = TaskData(rows, tokenizer, config.batch_size, config.micro_size, config.seed, checksum.hexdigest())
    return examples, model, data


def describe(scores: dict[str, float]) -> str:
    return ", ".join(f"{metric} {value:.1f}" for metric, value in scores.items())


def report(config: Config, result: dict) -> str:
    """A finished result as text: a table of the languages, and the gap to English."""
    lines = [f"\n{result['name']}: weights of step {result['step']}, best in English development\n"]
    columns = [result[kind] | {"mean": result[name]} for kind, name in COLUMNS.items()]
    rows = [[language, *(describe(scores.get(language, {})) for scores in columns)] for language in columns[0]]
    lines.append(markdown_table(["", "score", "guess without a model", "counting"], rows) + "\n")
    if result["gap"]:
        lines.append(f"English minus the mean of the other languages: {describe(result['gap'])}")
    if result["unlabelled"]:
        where = f"predictions are in {config.out_dir}/{result['name']}"
        lines.append(f"no test labels, not scored: {', '.join(result['unlabelled'])}; {where}")
    return "\n".join(lines)


def main():
    config, context = start(Config, PRESETS)
    with clear_errors():
        for _, change in table_of(config, PRESETS, TABLES).rows:  # refuses missing encoders before the first row
            for run in seeds_of(config, change):
                encoder_of(run)
    carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
