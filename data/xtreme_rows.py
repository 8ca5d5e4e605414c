"""From examples of XTREME's tasks to rows of tokens and batches, and from an encoder's outputs back to predictions."""

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
from data.tokenizers import XLMR
from data.xtreme import Example

UNKNOWN = -100  # the target that `cross_entropy` passes over


class Row(NamedTuple):
    """A sequence for the encoder: an example, or a part of a long one."""

    example: int  # its number
    ids: list[int]
    marks: list[tuple]  # (place in ids, what begins there): the number of a word, or (begin, end) in the text
    targets: list[int]  # a tag for each mark; or first and last place of the answer, 0 if it is not here; or a label


def rows_of(kind, examples: list[Example], tokenizer: XLMR, T, stride, labels: list) -> list[Row]:
    """All examples as rows of at most T tokens. Labels that are unknown or missing become UNKNOWN."""
    numbers = {label: number for number, label in enumerate(labels)}
    rows = []
    for number, example in enumerate(examples):
        if kind == "answer":
            rows += answer_rows(number, example, tokenizer, T, stride)
        elif kind == "tags":
            tags = example.gold or [None] * len(example.texts)
            targets = [numbers.get(tag, UNKNOWN) for tag in tags]
            rows += tag_rows(number, example.texts, targets, tokenizer, T)
        else:
            target = numbers.get(example.gold, UNKNOWN)
            rows.append(label_row(number, example.texts, target, tokenizer, T))
    return rows


def tag_rows(number, words, targets, tokenizer, T) -> Iterator[Row]:
    """`<s> words </s>` with a mark on the first piece of each word. A word that no longer fits begins a new row."""
    row = Row(number, [tokenizer.bos], [], [])
    for word, pieces in enumerate(tokenizer.encode_batch(list(words))):
        pieces = pieces[: T - 2] or [tokenizer.unk]  # of some words the tokenizer keeps nothing
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

    A part begins every `stride` tokens, or half a row. A long question is cut to half the row. The target is the first
    of several answers; an example whose answer is not in the text trains nothing.
    """
    question, text = example.texts
    [asked] = tokenizer.encode_batch([question])
    asked = asked[: T // 2 - 2]
    head = [tokenizer.bos, *asked, tokenizer.eos, tokenizer.eos]
    room = T - len(head) - 1
    stride = min(stride, T // 2, room)
    ids, spans = tokenizer.encode_offsets(text)
    answer = answer_places(example.gold, spans)
    for start in range(0, max(1, len(ids) - room + stride), stride):
        part = range(start, min(start + room, len(ids)))
        shift = len(head) - start  # from a token's place in the text to its place in the row
        marks = [(shift + token, spans[token]) for token in part]
        targets = [0, 0] if answer else [UNKNOWN, UNKNOWN]
        if answer and answer[0] in part and answer[-1] in part:
            targets = [shift + answer[0], shift + answer[-1]]
        own = ids[start : part.stop]
        yield Row(number, [*head, *own, tokenizer.eos], marks, targets)


def label_row(number: int, texts, target, tokenizer, T) -> Row:
    """`<s> one </s> </s> two </s>`. Where that is too long, the longer sentence loses its end."""
    texts = tokenizer.encode_batch(list(texts))
    room = T - 2 * len(texts)
    while sum(map(len, texts)) > room:
        max(texts, key=len).pop()
    ids = [tokenizer.bos]
    for text in texts:
        ids += [*text, tokenizer.eos, tokenizer.eos]
    return Row(number, ids[:-1], [], [target])


def answer_places(gold: list | None, spans: list) -> list[int]:
    """The tokens that hold the first answer, given the characters at which each token begins and ends."""
    if not gold or gold[0][1] < 0:
        return []
    text, begin = gold[0]
    end = begin + len(text.rstrip())  # a blank at its end would be the next word's
    begin += len(text) - len(text.lstrip())
    return [token for token, (first, last) in enumerate(spans) if last > begin and first < end]


class Batch(NamedTuple):
    """B rows of T tokens; flat positions count through all B * T."""

    ids: Tensor  # (B, T)
    real: Tensor | None  # (S,) flat positions of what is not padding; None: all of them
    words: Tensor  # (M,) flat positions of the marks
    targets: Tensor  # (M,) tags, (2 B,) first and last places of answers, or (B,) labels


def batch_of(rows: list[Row], pad: int) -> Batch:
    """The rows, padded to the longest of them."""
    lengths = np.array([len(row.ids) for row in rows])
    tokens = np.concatenate([row.ids for row in rows])
    ids, real = pad_rows(tokens, lengths, pad)
    first = range(0, ids.numel(), ids.shape[1])  # the flat position at which each row begins
    words = [begin + place for begin, row in zip(first, rows) for place, _ in row.marks]
    targets = [target for row in rows for target in row.targets]
    return Batch(ids, real, torch.tensor(words).long(), torch.tensor(targets).long())


class TaskData:
    """The training rows of a task in batches: a micro-batch is a function of (seed, step, micro) and of nothing else.

    An epoch is every row once in a random order; its last step is filled up with the epoch's first rows. `start` is
    what a run depends on besides, for the checksum.
    """

    def __init__(self, rows: list[Row], tokenizer: XLMR, batch_size: int, micro_size: int, seed: int, start: str):
        self.rows, self.tokenizer, self.seed = rows, tokenizer, seed
        self.micro_size, self.micros_per_step = micro_size, batch_size // micro_size
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        content = repr((rows, start)).encode()
        self.checksum = hashlib.sha256(content).hexdigest()
        self.order = lru_cache(maxsize=1)(self.order_of_epoch)

    def order_of_epoch(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.rows))
        micros = self.steps_per_epoch * self.micros_per_step
        return np.resize(order, micros * self.micro_size)

    def batch(self, step: int, micro: int) -> Batch:
        """micro_size rows for training; steps are counted through all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = (place * self.micros_per_step + micro) * self.micro_size
        chosen = self.order(epoch)[first : first + self.micro_size]
        rows = [self.rows[number] for number in chosen]
        return batch_of(rows, self.tokenizer.pad)


def row_predictions(kind, labels, rows: list[Row], logits: Tensor, longest: int) -> list[list]:
    """A list for each row: the tags of its words, its label, or its best answer."""
    if kind == "answer":
        pairs = logits.unflatten(0, (-1, 2))  # (B, 2, T) the answers' begins and ends
        return [[best_answer(row, *own, longest)] for row, own in zip(rows, pairs)]
    found = iter(labels[number] for number in logits.argmax(dim=1).tolist())
    return [list(islice(found, len(row.targets))) for row in rows]


def best_answer(row: Row, begins, ends, longest) -> tuple:
    """The likeliest answer of at most `longest` tokens: its score, and its begin and end in the text.

    begins, ends: (T,) logits of each token to be the answer's first or last.
    """
    if not row.marks:
        return -math.inf, 0, 0
    places, spans = zip(*row.marks)
    text = slice(places[0], places[-1] + 1)
    score = begins[text, None] + ends[text]  # (N, N) from a token of the text to another
    allowed = torch.ones_like(score, dtype=torch.bool).triu().tril(longest - 1)
    score = score.masked_fill(~allowed, -math.inf)
    begin, end = divmod(int(score.argmax()), len(score))
    return float(score[begin, end]), spans[begin][0], spans[end][1]


def by_example(kind, examples: list[Example], rows, found) -> list:
    """The prediction for each example, from what was found in its rows: found[number of the row]."""
    parts = [[] for _ in examples]
    for number, row in enumerate(rows):
        parts[row.example] += found[number]
    if kind == "tags":
        return parts
    best = [max(part) for part in parts]  # an answer of the highest score; there is but one label
    if kind == "label":
        return best
    texts = [example.texts[1] for example in examples]
    return [text[begin:end].strip() for text, (_, begin, end) in zip(texts, best)]
