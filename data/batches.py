"""Batches of prepared corpora.

`batch(split, step, micro)` depends only on the seed and these three arguments: a resumed run, and a run on any number
of processes, sees the same data as an uninterrupted one. `eval_batches` depends on the corpus, block_size and the
masking, not on the seed: scores of different runs are comparable.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.files import SPLITS, has_words
from data.folder import Prepared, Spans
from data.masking import DRAWS, Masking, index_within

# Each random generator's key begins with its purpose, so that no two purposes share numbers.
TRAINING, EVALUATION, POOL, PASS = range(4)
POOL_MICROS = 128  # micro-batches of pairs that are drawn and sorted together


class TokenData(Prepared):
    """Windows of T = block_size tokens. Raises ValueError if a split is too short for one."""

    def __post_init__(self):
        super().__post_init__()
        for split, tokens in self.tokens.items():
            if len(tokens) <= self.block_size:
                short = f"{self.folder / split}.bin has {len(tokens):,} tokens"
                needed = f"block_size {self.block_size} needs {self.block_size + 1:,}"
                raise ValueError(f"{short} and {needed}: use more text or a smaller --block_size")

    def batch(self, split, step, micro=0):
        """Inputs x and targets y of windows at random offsets; both (B, T) int64, y one token ahead of x."""
        return self.windows(split, self.starts(split, step, micro))

    def starts(self, split, step, micro) -> ndarray:  # (B,)
        last = len(self.tokens[split]) - self.block_size
        return self.random(TRAINING, split, step, micro).integers(last, size=self.batch_size)

    def windows(self, split, starts: ndarray) -> tuple[Tensor, Tensor]:
        index = starts[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        tokens = torch.from_numpy(self.tokens[split][index].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def seen(self, steps: int) -> Tensor:
        """(N,) bool: the training tokens that are targets in the first `steps` steps."""
        seen = np.zeros(len(self.tokens["train"]), dtype=bool)
        for step in range(steps):
            for micro in range(self.micros_per_step):
                for start in self.starts("train", step, micro):
                    seen[start + 1 : start + 1 + self.block_size] = True
        return torch.from_numpy(seen)

    def eval_batches(self, split, max_tokens=None, rank=0, world=1):
        """x and y of consecutive windows, from the whole split or its first max_tokens tokens.

        Processes take batches in turn. Up to T tokens at the end of the split are not read.
        """
        starts = np.arange(0, self.eval_tokens(split, max_tokens), self.block_size)
        for first in range(rank * self.batch_size, len(starts), world * self.batch_size):
            yield self.windows(split, starts[first : first + self.batch_size])

    def eval_tokens(self, split, max_tokens=None) -> int:
        """The number of tokens that `eval_batches` predicts."""
        count = (len(self.tokens[split]) - 1) // self.block_size
        if max_tokens is not None:
            count = min(count, max(1, max_tokens // self.block_size))
        return count * self.block_size

    def eval_counts(self, split, max_tokens=None) -> dict[str, int]:
        """The size of what `eval_batches` predicts: `tokens`, `bytes` and, if spaces separate words, `words`."""
        count, eot = self.eval_tokens(split, max_tokens), self.tokenizer.eot
        tokens = self.tokens[split][1 : 1 + count]
        documents = np.split(tokens, np.flatnonzero(tokens == eot))
        text = " ".join(self.tokenizer.decode(ids[ids != eot].tolist()) for ids in documents)
        size = len(text.encode()) - len(documents) + 1
        words = {"words": len(text.split())} if has_words(text) else {}
        return {"tokens": count, "bytes": size} | words


def probabilities(sizes: ndarray, train: ndarray, exponent: float) -> ndarray:
    """(J,) the probability of drawing each language, proportional to n_j ** exponent (XLM-E eq. 9).

    train: (J,) n_j; sizes: (J,) each language's size in the split that is read: an empty one is not drawn.
    """
    weights = np.where(sizes > 0, train ** float(exponent), 0)
    return weights / weights.sum()


def evenly(language: ndarray, lengths: ndarray, max_tokens) -> ndarray:
    """Row numbers, in total about max_tokens tokens: the first row of every language, then the second of every one ...

    language, lengths: (R,) of all rows, languages ascending. max_tokens None: all rows.
    """
    if max_tokens is None:
        return np.arange(len(language))
    order = index_within(language).argsort(kind="stable")
    enough = (lengths[order].cumsum() <= max_tokens).sum()
    return order[: max(1, enough)]


def gather(tokens: ndarray, starts: ndarray, sizes: ndarray) -> ndarray:
    """(N,) int64, the concatenated tokens of texts. starts: (R,) where each begins; sizes: (R,) its length."""
    ends = sizes.cumsum()
    index = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
    return tokens[index].astype(np.int64)


def pad_rows(tokens: ndarray, lengths: ndarray, pad, width=0) -> tuple[Tensor, Tensor | None]:
    """Pads B rows, given as concatenated tokens (N,) and lengths (B,), to the longest row or to a larger width.

    -> ids (B, T), and the flat indices (N,) of non-padding tokens, or None if there is no padding.
    """
    nonpad = np.arange(max(width, lengths.max())) < lengths[:, None]  # (B, T)
    ids = np.full(nonpad.shape, pad, dtype=np.int64)
    ids[nonpad] = tokens
    return torch.from_numpy(ids), None if nonpad.all() else torch.from_numpy(np.flatnonzero(nonpad))


def cut(sizes: ndarray, micro_tokens: int) -> list[slice]:
    """Cuts a sequence of rows into batches of at most micro_tokens tokens, padding included, or of one longer row.

    sizes: (R, sides) the length of each row on each side; each side of a batch is as wide as its longest row.
    """
    begin, batches = 0, []
    widths = [0] * sizes.shape[1]
    for row, lengths in enumerate(sizes.tolist()):
        widths = list(map(max, widths, lengths))
        if row > begin and (row + 1 - begin) * sum(widths) > micro_tokens:
            batches.append(slice(begin, row))
            begin = row
            widths = lengths
    if len(sizes):
        batches.append(slice(begin, len(sizes)))
    return batches


class Masked(NamedTuple):
    """B rows of T tokens, `<s>` and the text of one language (or pair). Flat indices count through all B * T."""

    ids: Tensor  # (B, T) after masking
    masked: Tensor  # (M,) flat indices of the tokens to predict, ascending
    targets: Tensor  # (M,) the tokens to predict
    nonpad: Tensor | None  # (S,) flat indices of non-padding tokens, ascending; None: there is no padding
    language: Tensor  # (M,) index into the data's `languages`

    @property
    def tokens(self) -> int:
        return self.ids.numel() if self.nonpad is None else len(self.nonpad)


@dataclass(eq=False)
class MaskedData(Prepared):
    """A corpus of many languages, in rows of `<s>` and block_size - 1 tokens of one language, some of them masked.

    A row's language is drawn with the `probabilities` of the training tokens, its offset uniformly at random.
    """

    exponent: float = 0.7  # of `probabilities`
    mask_share: float = 0.15  # this and the next: see Masking
    replace: tuple[float, float] = (0.8, 0.1)

    kind = "languages"

    def __post_init__(self):
        super().__post_init__()
        self.masking = Masking(self.tokenizer, self.mask_share, self.replace)

    def draw_languages(self, rng, split, count: int) -> ndarray:
        shares = probabilities(self.streams[split][:, 1], self.streams["train"][:, 1], self.exponent)
        return rng.choice(len(shares), count, p=shares)

    def batch(self, split, step, micro=0) -> Masked:
        """A micro-batch for training. If a language is shorter than a row, its rows are padded."""
        rng = self.random(TRAINING, split, step, micro)
        language = self.draw_languages(rng, split, self.batch_size)
        first, count = self.streams[split][language].T
        sizes = np.minimum(count, self.block_size - 1)
        starts = first + rng.integers(count - sizes + 1)
        rows = Spans(language, starts[:, None], sizes[:, None])
        return self.mask_rows(split, rows, rng.random((DRAWS, rows.lengths.sum())), width=self.block_size)

    def all_rows(self, split) -> Spans:
        """The text of every language in consecutive rows. A language's last row may be shorter."""
        width = self.block_size - 1
        first, count = self.streams[split].T
        language = np.repeat(np.arange(len(count)), -(-count // width))
        offset = width * index_within(language)
        starts = first[language] + offset
        sizes = np.minimum(width, count[language] - offset)
        return Spans(language, starts[:, None], sizes[:, None])

    def eval_rows(self, split, max_tokens) -> Spans:
        """The rows that evaluation reads, longest first."""
        rows = self.all_rows(split)
        rows = rows.take(evenly(rows.language, rows.lengths, max_tokens))
        return rows.take(np.lexsort((rows.starts[:, 0], -rows.lengths)))

    def eval_tokens(self, split, max_tokens=None) -> int:
        """The number of non-padding tokens that `eval_batches` reads in one masking."""
        return int(self.eval_rows(split, max_tokens).lengths.sum())

    def eval_batches(self, split, maskings=10, max_tokens=None, rank=0, world=1, masked=(0, 1), shown=(0, 1)):
        """(k, first, Masked): all rows, or about max_tokens tokens of them (see evenly), masked in `maskings` ways.

        k is the number of the masking, `first` the number of the batch's first token among all that are read. Processes
        take batches in turn. A pair's texts in `shown` are in the rows, and those in `masked` are masked. The masks of
        a text depend only on k and its position in the corpus, not on the text shown with it.
        """
        rows = self.eval_rows(split, max_tokens)
        batches = cut(rows.lengths[:, None], self.micro_tokens)
        texts = [text for text in shown if text < rows.sizes.shape[1]]
        rows = Spans(rows.language, rows.starts[:, texts], rows.sizes[:, texts])
        to_mask = [text in masked for text in texts]
        firsts = rows.lengths.cumsum() - rows.lengths
        for turn in range(rank, maskings * len(batches), world):
            k, number = divmod(turn, len(batches))
            first = firsts[batches[number].start]
            batch = rows.take(batches[number])
            yield k, int(first), self.mask_rows(split, batch, self.fixed_random(k, batch), to_mask)

    def fixed_random(self, k: int, rows: Spans) -> ndarray:
        """(DRAWS, N) random numbers, which depend only on k and the offset of each text."""
        drawn = []
        for starts, sizes in zip(rows.starts, rows.sizes):
            drawn.append(np.zeros((DRAWS, 1)))  # for `<s>`, which is never masked
            for start, size in zip(starts, sizes):
                drawn.append(np.random.default_rng((EVALUATION, k, start)).random((DRAWS, size)))
        return np.concatenate(drawn, axis=1)

    def mask_rows(self, split, rows: Spans, random: ndarray, to_mask=None, width=0) -> Masked:
        """The batch of these rows of N tokens in total.

        random: (DRAWS, N); to_mask: (P,) bool, the texts of a row that are masked, None: all; width: see pad_rows.
        """
        starts = np.insert(rows.starts, 0, 0, axis=1)
        sizes = np.insert(rows.sizes, 0, 1, axis=1)  # (R, 1 + P): the `<s>` counts as a text
        tokens = gather(self.tokens[split], starts.flatten(), sizes.flatten())
        ends = sizes.cumsum().reshape(sizes.shape)
        tokens[ends[:, 0] - 1] = self.tokenizer.bos
        if self.kind == "pairs":
            tokens[ends[:, 1:] - 1] = self.tokenizer.eos  # truncated texts end in </s>, too
        part = np.repeat(np.arange(sizes.size), sizes.flatten())
        chosen = self.masking.choose(tokens, part, random)
        if to_mask is not None:
            chosen &= np.tile([False, *to_mask], len(sizes))[part]
        hidden = self.masking.hide(tokens, chosen, random)
        ids, nonpad = pad_rows(hidden, rows.lengths, self.tokenizer.pad, width)
        masked = torch.from_numpy(np.flatnonzero(chosen))
        if nonpad is not None:
            masked = nonpad[masked]
        language = np.repeat(rows.language, rows.lengths)[chosen]
        return Masked(ids, masked, torch.from_numpy(tokens[chosen]), nonpad, torch.from_numpy(language))


class PairData(MaskedData):
    """A corpus of translation pairs, in rows `<s> first </s> second </s>` of at most block_size tokens.

    A language pair is drawn with the `probabilities` of the training pairs, and one of its pairs uniformly at random.
    Each half is masked separately. If a row would be too long, the longer half is cut first.
    """

    kind = "pairs"

    def __post_init__(self):
        super().__post_init__()
        self.pool = lru_cache(maxsize=1)(self.draw_pool)

    def batch(self, split, step, micro=0) -> Masked:
        """A micro-batch for training, of pairs of about equal length."""
        number, index = divmod(step * self.micros_per_step + micro, POOL_MICROS)
        rows = self.pool(split, number)[index]
        random = self.random(TRAINING, split, step, micro).random((DRAWS, rows.lengths.sum()))
        return self.mask_rows(split, rows, random)

    def draw_pool(self, split, number: int) -> list[Spans]:
        """POOL_MICROS micro-batches: pairs are drawn, sorted by length and cut; random batches of these are kept."""
        rng = self.random(POOL, split, number)
        drawn, tokens = [], 0
        while tokens < POOL_MICROS * self.micro_tokens:
            language = self.draw_languages(rng, split, count=256)
            first, count = self.streams[split][language].T
            drawn.append(self.pairs(split, first + rng.integers(count)))
            tokens += drawn[-1].lengths.sum()
        rows = Spans(*map(np.concatenate, zip(*drawn)))
        rows = rows.take(rows.lengths.argsort(kind="stable"))
        micros = cut(rows.lengths[:, None], self.micro_tokens)
        return [rows.take(micros[index]) for index in rng.permutation(len(micros))[:POOL_MICROS]]

    def all_rows(self, split) -> Spans:
        return self.pairs(split, np.arange(self.meta["splits"][split]["pairs"]))

    def pairs(self, split, numbers: ndarray) -> Spans:
        """Pairs as in Prepared, cut to rows of at most block_size tokens, the longer half first."""
        rows = super().pairs(split, numbers)
        one, two = rows.sizes.T
        room = self.block_size - 1
        one = np.minimum(one, np.maximum(room - two, room - room // 2))
        two = np.minimum(two, room - one)
        return rows._replace(sizes=np.stack([one, two], axis=1))


class Translation(NamedTuple):
    """B sources of up to N tokens and their translations of up to T. Flat indices count through all rows."""

    source: Tensor  # (B, N) each text and its </s>
    source_nonpad: Tensor | None  # (S,) flat indices of non-padding tokens; None: there is no padding
    target: Tensor  # (B, T) <s> and the translation: the decoder's input
    target_nonpad: Tensor | None  # (M,)
    labels: Tensor  # (M,) the next token at each of these: the translation and its </s>

    @property
    def tokens(self) -> int:
        source = self.source if self.source_nonpad is None else self.source_nonpad
        return source.numel() + len(self.labels)


@dataclass(eq=False)
class TranslationData(Prepared):
    """A corpus of translation pairs, translated into the language `target`, which may be the first or second of a pair.

    Each pass through the training text visits every pair once, in a new order. With an `exponent` below 1, a pass has
    the same number of pairs, divided among the language pairs by `probabilities`: a large language pair continues in
    the next pass, a small one repeats within a pass. Pairs in which a text has more than block_size tokens, `</s>`
    included, are excluded from training and from losses, and counted in `left_out`.
    """

    exponent: float = 1.0
    target: str = "en"

    kind = "pairs"

    def __post_init__(self):
        super().__post_init__()
        for name in self.languages:
            if not (name.startswith(f"{self.target}-") or name.endswith(f"-{self.target}")):
                raise ValueError(f"{self.folder} has pairs without the language {self.target!r}: {name}; see --target")
        self.target_first = [not name.endswith(f"-{self.target}") for name in self.languages]
        self.fitting = {split: self.find_fitting(split) for split in SPLITS}
        fitting = {split: sum(map(len, numbers)) for split, numbers in self.fitting.items()}
        self.left_out = {split: self.meta["splits"][split]["pairs"] - count for split, count in fitting.items()}
        self.order = lru_cache(maxsize=2)(self.order_pass)  # the first pass, for its length, and the current one

    def find_fitting(self, split) -> list[ndarray]:
        """The numbers of each language pair's pairs that are short enough."""
        fitting = []
        for first, count in self.streams[split].tolist():
            numbers = np.arange(first, first + count)
            longest = self.pairs(split, numbers).sizes.max(axis=1)
            fitting.append(numbers[longest <= self.block_size])
        counts = list(map(len, fitting))
        if not sum(counts) or (split == "train" and not min(counts)):
            pairs = f"all {split} pairs of {self.languages[counts.index(0)]} in {self.folder}"
            raise ValueError(f"{pairs} are longer than block_size {self.block_size} tokens")
        return fitting

    def batch(self, split, step, micro=0) -> Translation:
        """A micro-batch for training, of pairs of about equal length."""
        number, index = divmod(step * self.micros_per_step + micro, len(self.order(split, 0)))
        micros = self.order(split, number)
        # With an exponent, passes differ by a few micro-batches from the first one: skip or repeat those.
        return self.translation(split, micros[index % len(micros)])

    def order_pass(self, split, number: int) -> list[ndarray]:
        """The micro-batches of a pass, (B,) pairs each: pairs are shuffled, sorted by length and cut, batches shuffled.
        Takes about 2 s and 200 MB per million pairs, once per pass."""
        rng, fitting = self.random(PASS, split, number), self.fitting[split]
        sizes = np.array(list(map(len, fitting)))
        shares = probabilities(sizes, sizes, self.exponent)
        counts = np.maximum(np.rint(shares * sizes.sum()), sizes > 0).astype(np.int64)
        drawn = []
        for numbers, count in zip(fitting, counts):
            turns = np.arange(number * count, (number + 1) * count)
            drawn.append(numbers[turns % max(1, len(numbers))])
        micros = self.sort_and_cut(split, rng.permutation(np.concatenate(drawn)))
        return [micros[index] for index in rng.permutation(len(micros))]

    def sort_and_cut(self, split, numbers: ndarray) -> list[ndarray]:
        """Cuts pairs into batches of similar lengths, long sources first. Translations ascend at odd source lengths and
        descend at even ones, so that neighbours are similar where the source length changes."""
        sizes = self.pairs(split, numbers).sizes
        source, target = sizes.T
        zigzag = np.where(source % 2, target, -target)
        order = np.lexsort((zigzag, -source))
        return [numbers[order[batch]] for batch in cut(sizes[order], self.micro_tokens)]

    def eval_batches(self, split, max_tokens=None, rank=0, world=1):
        """All pairs that are short enough, or about max_tokens tokens of them (see evenly). Processes take turns."""
        numbers = np.concatenate(self.fitting[split])
        rows = self.pairs(split, numbers)
        numbers = numbers[evenly(rows.language, rows.sizes.sum(axis=1), max_tokens)]
        for batch in self.sort_and_cut(split, numbers)[rank::world]:
            yield self.translation(split, batch)

    def pairs(self, split, numbers: ndarray) -> Spans:
        """Pairs as in Prepared, but with the source first."""
        language, starts, sizes = super().pairs(split, numbers)
        swap = np.array(self.target_first)[language]
        starts[swap] = starts[swap, ::-1]
        sizes[swap] = sizes[swap, ::-1]
        return Spans(language, starts, sizes)

    def texts(self, split, language: str) -> tuple[list, list]:
        """The sources and the translations of a language pair in "valid" or "test", in their original form."""
        both = super().texts(split, language)
        return both[::-1] if self.target_first[self.languages.index(language)] else both

    def translation(self, split, numbers: ndarray) -> Translation:
        rows = self.pairs(split, numbers)
        source_sizes, target_sizes = rows.sizes.T
        sources = gather(self.tokens[split], rows.starts[:, 0], source_sizes)
        labels = gather(self.tokens[split], rows.starts[:, 1], target_sizes)
        inputs = np.roll(labels, 1)
        inputs[target_sizes.cumsum() - target_sizes] = self.tokenizer.bos  # replaces the previous text's `</s>`
        source = pad_rows(sources, source_sizes, self.tokenizer.pad)
        target = pad_rows(inputs, target_sizes, self.tokenizer.pad)
        return Translation(*source, *target, torch.from_numpy(labels))


def source_batches(sources: dict[int, list[int]], pad: int, micro_tokens: int):
    """Sources to translate, longest first, in batches of at most micro_tokens tokens, padding included.

    sources: number -> ids. Yields the numbers of a batch, and its (source, source_nonpad) as in Translation.
    """
    numbers = sorted(sources, key=lambda number: -len(sources[number]))
    lengths = np.array([len(sources[number]) for number in numbers])
    for batch in cut(lengths[:, None], micro_tokens):
        ids = np.concatenate([sources[number] for number in numbers[batch]])
        yield numbers[batch], pad_rows(ids, lengths[batch], pad)
