"""Turns examples of XTREME's tasks into rows of tokens and batches, and an encoder's outputs into predictions."""

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batches import pad_rows
from data.files import progress
from data.tokenizers import XLMR
from data.xtreme import Example

UNKNOWN = -100  # the target that `cross_entropy` ignores


class Row(NamedTuple):
    """A sequence for the encoder: an example, or a part of a long one."""

    example: int  # number of the example
    ids: list[int]
    marks: list[tuple]  # (index in ids, number of the word that begins there, or the token's (begin, end) in the text)
    targets: list[int]  # a tag for each mark; the answer's first and last index in ids, 0 if not here; or a label


def rows_of(kind, examples: list[Example], tokenizer: XLMR, T, stride, labels: list) -> list[Row]:
    """The examples as rows of at most T tokens. Unknown and missing labels become UNKNOWN."""
    numbers = {label: number for number, label in enumerate(labels)}
    rows = []
    for number, example in enumerate(progress(examples, "tokenizing")):
        if kind == "answer":
            rows += answer_rows(number, example, tokenizer, T, stride)
        elif kind == "tags":
            tags = example.gold or [None] * len(example.texts)
            targets = [numbers.get(tag, UNKNOWN) for tag in tags]
            rows += tag_rows(number, example.texts, targets, tokenizer, T)
        else:
            rows.append(label_row(number, example.texts, numbers.get(example.gold, UNKNOWN), tokenizer, T))
    return rows


def tag_rows(number, words, targets, tokenizer, T) -> Iterator[Row]:
    """`<s> words </s>` with a mark on the first piece of each word. A word that no longer fits begins a new row."""
    row = Row(number, [tokenizer.bos], [], [])
    for word, pieces in enumerate(tokenizer.encode_batch(list(words))):
        pieces = pieces[: T - 2] or [tokenizer.unk]  # some words have no pieces
        if len(row.ids) + len(pieces) >= T:
            row.ids.append(tokenizer.eos)
            yield row
            row = Row(number, [tokenizer.bos], [], [])
        row.marks.append((len(row.ids), word))
        row.targets.append(targets[word])
        row.ids.extend(pieces)
    row.ids.append(tokenizer.eos)
    yield row


def answer_rows(number, example, tokenizer, T, stride) -> Iterator[Row]:
    """`<s> question </s> </s> part of the text </s>` with marks on all tokens of the text.

    A part begins every `stride` tokens, at most half a row. A long question is cut to half a row. The target is the
    first of several answers, and UNKNOWN if the text does not contain it.
    """
    question, text = example.texts
    [question_ids] = tokenizer.encode_batch([question])
    head = [tokenizer.bos, *question_ids[: T // 2 - 2], tokenizer.eos, tokenizer.eos]
    room = T - len(head) - 1
    stride = min(stride, T // 2, room)
    ids, spans = tokenizer.encode_offsets(text)
    answer = answer_tokens(example.gold, spans)
    for start in range(0, max(1, len(ids) - room + stride), stride):
        part = range(start, min(start + room, len(ids)))
        shift = len(head) - start  # from a token's index in the text to its index in the row
        marks = [(shift + token, spans[token]) for token in part]
        targets = [0, 0] if answer else [UNKNOWN, UNKNOWN]
        if answer and answer[0] in part and answer[-1] in part:
            targets = [shift + answer[0], shift + answer[-1]]
        yield Row(number, [*head, *ids[start : part.stop], tokenizer.eos], marks, targets)


def label_row(number: int, texts, target, tokenizer, T) -> Row:
    """`<s> one </s> </s> two </s>`. If that is too long, the longer sentence is truncated."""
    texts = tokenizer.encode_batch(list(texts))
    while sum(map(len, texts)) > T - 2 * len(texts):
        max(texts, key=len).pop()
    ids = [tokenizer.bos]
    for text in texts:
        ids += [*text, tokenizer.eos, tokenizer.eos]
    return Row(number, ids[:-1], [], [target])


def answer_tokens(gold: list | None, spans: list) -> list[int]:
    """The tokens that overlap the first answer; spans: the characters at which each token begins and ends."""
    if not gold or gold[0][1] < 0:
        return []
    text, begin = gold[0]
    end = begin + len(text.rstrip())  # a trailing space belongs to the next word's token
    begin += len(text) - len(text.lstrip())
    return [token for token, (first, last) in enumerate(spans) if last > begin and first < end]


class Batch(NamedTuple):
    """B rows of T tokens; flat indices count through all B * T."""

    ids: Tensor  # (B, T)
    nonpad: Tensor | None  # (S,) flat indices of non-padding tokens; None: all of them
    words: Tensor  # (M,) flat indices of the marks
    targets: Tensor  # (M,) tags, (2 B,) first and last indices of answers, or (B,) labels


def batch_of(rows: list[Row], pad: int) -> Batch:
    """The rows, padded to the longest one."""
    lengths = np.array([len(row.ids) for row in rows])
    ids, nonpad = pad_rows(np.concatenate([row.ids for row in rows]), lengths, pad)
    first = range(0, ids.numel(), ids.shape[1])  # the flat index at which each row begins
    words = [begin + index for begin, row in zip(first, rows) for index, _ in row.marks]
    targets = [target for row in rows for target in row.targets]
    return Batch(ids, nonpad, torch.tensor(words).long(), torch.tensor(targets).long())


class TaskData:
    """The training rows of a task in batches: a micro-batch depends only on (seed, step, micro).

    An epoch is every row once in a random order; its last step is filled up with the epoch's first rows. `start` is a
    hash of everything else that a run depends on, for the checksum.
    """

    def __init__(self, rows: list[Row], tokenizer: XLMR, batch_size: int, micro_size: int, seed: int, start: str):
        self.rows, self.tokenizer, self.seed = rows, tokenizer, seed
        self.micro_size, self.micros_per_step = micro_size, batch_size // micro_size
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.checksum = hashlib.sha256(repr((rows, start)).encode()).hexdigest()
        self.order = lru_cache(maxsize=1)(self.order_of_epoch)

    def order_of_epoch(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        return np.resize(order, self.steps_per_epoch * self.micros_per_step * self.micro_size)

    def batch(self, step: int, micro: int) -> Batch:
        """micro_size rows for training; `step` counts through all epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        first = (step * self.micros_per_step + micro) * self.micro_size
        numbers = self.order(epoch)[first : first + self.micro_size]
        return batch_of([self.rows[number] for number in numbers], self.tokenizer.pad)


def row_predictions(kind, labels, rows: list[Row], logits: Tensor, longest: int) -> list[list]:
    """A list for each row: the tags of its words, its label, or its best answer."""
    if kind == "answer":
        pairs = logits.unflatten(0, (-1, 2))  # (B, 2, T) begins and ends of answers
        return [[best_answer(row, begins, ends, longest)] for row, (begins, ends) in zip(rows, pairs)]
    names = iter(labels[number] for number in logits.argmax(dim=1).tolist())
    return [list(islice(names, len(row.targets))) for row in rows]


def best_answer(row: Row, begins, ends, longest) -> tuple:
    """The most likely answer of at most `longest` tokens: its score, and its begin and end in the text.

    begins, ends: (T,) logits that a token is the answer's first or last.
    """
    if not row.marks:
        return -math.inf, 0, 0
    indices, spans = zip(*row.marks)
    text = slice(indices[0], indices[-1] + 1)
    score = begins[text, None] + ends[text]  # (N, N) from each token of the text to each
    allowed = torch.ones_like(score, dtype=torch.bool).triu().tril(longest - 1)
    score = score.masked_fill(~allowed, -math.inf)
    begin, end = divmod(int(score.argmax()), len(score))
    return float(score[begin, end]), spans[begin][0], spans[end][1]


def by_example(kind, examples: list[Example], rows, predicted) -> list:
    """The prediction for each example, from those for its rows: predicted[number of the row]."""
    parts = [[] for _ in examples]
    for number, row in enumerate(rows):
        parts[row.example] += predicted[number]
    if kind == "tags":
        return parts
    best = list(map(max, parts))  # the answer with the highest score; an example has only one label
    if kind == "label":
        return best
    texts = [example.texts[1] for example in examples]
    return [text[begin:end].strip() for text, (_, begin, end) in zip(texts, best)]
