"""Batches from a prepared corpus: a micro-batch is a function of (seed, split, step, micro) and of nothing else.

    TokenData          windows of a text
    MaskedData         windows of one language each, masked
    PairData           pairs of translations, masked
    TranslationData    sources and translations

So a resumed run and any number of processes see the data of one uninterrupted process. Evaluation reads a split in an
order that depends on the data and block_size alone, under masks that depend on the text alone: runs can be compared.
"""

import difflib
import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.files import SPLITS
from data.prepare import checksum, sha256
from data.tokenizers import Tokenizer, load_tokenizer

# What random numbers are for. It begins the key of every generator, so that no two purposes share one.
TRAINING, EVALUATION, POOL, PASS = range(4)
POOL_MICROS = 128  # micro-batches of pairs that are drawn and sorted together
DRAWN = 256  # pairs that are drawn at once


def generator(purpose: int, *key: int) -> np.random.Generator:
    return np.random.default_rng((purpose, *key))


class Prepared:
    """A folder written by `python -m data.prepare`, its tokens memory-mapped; B = micro_tokens // T rows a batch.

    Raises FileNotFoundError or ValueError, in one line, when the folder is missing, damaged or of another kind.
    """

    kind: str | None = None  # of the corpora that the class reads, see data.corpora; None: any
    example = "pydocs"
    least_block = 8

    def __init__(self, folder: Path | str, block_size: int, micro_tokens: int, micros_per_step: int = 1, seed: int = 0):
        if block_size < self.least_block:
            raise ValueError(f"block_size {block_size} must be at least {self.least_block} tokens")
        if micro_tokens < block_size:
            raise ValueError(f"micro_tokens {micro_tokens} must be at least one block of {block_size} tokens")
        if self.kind != "pairs" and micro_tokens % block_size:
            raise ValueError(f"block_size {block_size} does not divide micro_tokens {micro_tokens}")
        self.folder = Path(folder)
        self.block_size = block_size
        self.micro_tokens = micro_tokens
        self.batch_size = micro_tokens // block_size
        self.micros_per_step = micros_per_step
        self.seed = seed
        self.meta = read_meta(self.folder)
        if self.kind not in (None, self.meta["kind"]):
            what = f"{self.folder} holds {self.meta['name']!r}, a corpus of {self.meta['kind']}"
            hint = f"{type(self).__name__} reads {self.kind}: python -m data.prepare {self.example}"
            raise ValueError(f"{what}; {hint}")
        self.checksum: str = self.meta["checksum"]
        self.vocab_size: int = self.meta["tokenizer"]["vocab_size"]
        self.languages = sorted(self.meta.get("languages", []))
        self.tokens = {}  # split -> (N,)
        self.index = {}  # split -> (2 pairs + 1,), where each text begins; of pairs alone
        self.streams = {}  # split -> (J, 2), where each language begins and how much it has: tokens, or pairs
        for split, counts in self.meta["splits"].items():
            self.tokens[split] = self._map(f"{split}.bin", self.meta["dtype"], counts["tokens"])
            if self.meta["kind"] == "pairs":
                self.index[split] = self._map(f"{split}.idx", "int64", 2 * counts["pairs"] + 1)
            self.streams[split] = self._streams(split)

    def _map(self, name: str, dtype: str, count: int) -> ndarray:
        path = self.folder / name
        expected = count * np.dtype(dtype).itemsize
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {prepare_again(self.meta)}")
        if not count:
            raise ValueError(f"{path} holds no text; {prepare_again(self.meta)}")
        if path.stat().st_size != expected:
            what = f"{path} has {path.stat().st_size:,} bytes instead of {expected:,}"
            raise ValueError(f"{what}; {prepare_again(self.meta)}")
        return np.memmap(path, dtype, mode="r").view(ndarray)

    def _streams(self, split: str) -> ndarray:
        names = ("first", "pairs") if self.meta["kind"] == "pairs" else ("first", "tokens")
        streams = []
        for language in self.languages:
            counts = self.meta["languages"][language][split]
            streams.append([counts[name] for name in names])
        return np.array(streams, dtype=np.int64)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. ValueError if its file has changed since."""
        tokenizer = load_tokenizer(self.folder)
        if tokenizer.sha256 != self.meta["tokenizer"]["sha256"]:
            what = f"the tokenizer in {self.folder} is not the one that made its tokens"
            raise ValueError(f"{what}; {prepare_again(self.meta)}")
        return tokenizer

    def verify(self, largest: int = 1 << 34):
        """Read the files through and compare their SHA-256; ValueError names the first that has changed.

        Files over `largest` bytes are left alone: they take minutes, while other processes wait. Their size is right.
        """
        for name, expected in self.meta["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing; {prepare_again(self.meta)}")
            if path.stat().st_size <= largest and sha256(path) != expected:
                raise ValueError(f"{path} has changed since it was written; {prepare_again(self.meta)}")

    def random(self, purpose: int, split: str, *key: int) -> np.random.Generator:
        return generator(purpose, self.seed, SPLITS.index(split), *key)

    def pairs_of(self, split: str, language: str) -> range:
        """The numbers of the pairs of a language pair in a split."""
        if language not in self.languages:
            nearest = difflib.get_close_matches(language, self.languages, n=1, cutoff=0)[0]
            raise ValueError(f"no pair {language!r} among {len(self.languages)}; did you mean {nearest!r}?")
        number = self.languages.index(language)
        first, count = self.streams[split][number].tolist()
        return range(first, first + count)

    def raw(self, split: str, language: str) -> Iterator[tuple[ndarray, ndarray]]:
        """First and second text of every pair of that language pair, ids without special tokens, in order."""
        for pair in self.pairs_of(split, language):
            begin, middle, end = self.index[split][2 * pair : 2 * pair + 3]
            tokens = self.tokens[split][begin:end].astype(np.int64)
            yield tokens[: middle - begin - 1], tokens[middle - begin : -1]


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared folder; FileNotFoundError or ValueError when it is missing, damaged or edited."""
    path = folder / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"no prepared data in {folder}; prepare it: python -m data.prepare {folder.name}")
    again = prepare_again({"name": folder.name})
    try:
        meta = json.loads(path.read_text())
        intact = meta["checksum"] == checksum(meta)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; {again}") from error
    if not intact:
        raise ValueError(f"{path} has changed since it was written; {again}")
    return meta


def prepare_again(meta: dict) -> str:
    return f"prepare it again: python -m data.prepare {meta['name']} (--help says how)"


# ---------------------------------------------------------------------------------------------------------------------
# one language


class TokenData(Prepared):
    """Windows of T = block_size tokens. ValueError when a split is too short for one."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for split, tokens in self.tokens.items():
            if len(tokens) <= self.block_size:
                needed = f"block_size {self.block_size} needs {self.block_size + 1:,}"
                raise ValueError(f"{self.folder / split}.bin has {len(tokens):,} tokens and {needed}")

    def batch(self, split: str, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs x and targets y of windows at random places, both (B, T) int64 and y one token ahead."""
        rng = self.random(TRAINING, split, step, micro)
        places = len(self.tokens[split]) - self.block_size
        starts = rng.integers(places, size=self.batch_size)  # (B,)
        return self._windows(split, starts)

    def eval_batches(
        self, split: str, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The split (or about its first max_tokens) in order, in disjoint windows dealt round-robin to processes.

        Yields x and y, both (rows, T) with rows = B but perhaps in the last. Up to T tokens at the end are unused.
        """
        windows = (len(self.tokens[split]) - 1) // self.block_size
        if max_tokens is not None:
            windows = min(windows, max(1, max_tokens // self.block_size))
        for first in range(rank * self.batch_size, windows, world * self.batch_size):
            last = min(first + self.batch_size, windows)
            yield self._windows(split, self.block_size * np.arange(first, last))

    def _windows(self, split: str, starts: ndarray) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        window = torch.from_numpy(self.tokens[split][places].astype(np.int64))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# what the data of many languages share


def probabilities(sizes: ndarray, train: ndarray, exponent: float) -> ndarray:
    """XLM-E eq. 9: p_j is proportional to n_j ** exponent, of the languages that have text in a split.

    sizes, train: (J,) what each has there, and in training (n_j).
    """
    weights = np.where(sizes > 0, train ** float(exponent), 0)
    return weights / weights.sum()


def shares(streams: dict[str, ndarray], exponent: float) -> dict[str, ndarray]:
    """split -> (J,) the probability of each language."""
    train = streams["train"][:, 1]
    return {split: probabilities(own[:, 1], train, exponent) for split, own in streams.items()}


def pad_rows(rows: list[ndarray], pad: int, width: int = 0) -> tuple[ndarray, ndarray | None]:
    """ids (B, T) of the rows, as wide as the longest or `width`, and the flat positions (S,) of what is not padding.

    None instead of the positions where nothing is padding.
    """
    lengths = np.array([len(row) for row in rows])
    width = max(width, int(lengths.max()))
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    if lengths.min() == width:
        return ids, None
    return ids, np.flatnonzero(np.arange(width) < lengths[:, None])


def cut(sizes: ndarray, micro_tokens: int) -> list[tuple[int, int]]:
    """Where batches of rows begin and end that hold at most micro_tokens tokens with their padding, or a single row.

    sizes: (R, sides), the lengths of a row on each side; a side of a batch is as wide as its longest row.
    """
    batches = []
    begin = 0
    widths = [0] * sizes.shape[1]
    for row, lengths in enumerate(sizes.tolist()):
        widths = [max(width, length) for width, length in zip(widths, lengths)]
        if row > begin and (row + 1 - begin) * sum(widths) > micro_tokens:
            batches.append((begin, row))
            begin = row
            widths = lengths
    if len(sizes):
        batches.append((begin, len(sizes)))
    return batches


def tensors(*arrays: ndarray | None) -> list[Tensor | None]:
    return [None if array is None else torch.from_numpy(array) for array in arrays]


# ---------------------------------------------------------------------------------------------------------------------
# masks


class Masked(NamedTuple):
    """B rows of T tokens, each `<s>` and text of one language (pair); flat positions count through all B * T."""

    ids: Tensor  # (B, T) after masking
    masked: Tensor  # (M,) flat positions of the tokens to predict, ascending
    targets: Tensor  # (M,) what stood there
    real: Tensor | None  # (S,) flat positions of what is not padding, ascending; None: all of them
    language: Tensor  # (M,) index into the data's `languages`


class Masking:
    """Chooses a share of each row's tokens and hides them.

    Of n tokens that are not special n * share are chosen, rounded up or down at random so that the mean is exact, but
    at least one if there is any: uniformly, or, with `span`, in spans of geometric length with that mean, in random
    places, until there are enough; the last is cut. `replace` holds the probabilities that a chosen token becomes the
    mask and that it becomes a random token; otherwise it stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer, share: float, replace: tuple[float, float], span: float | None):
        if not 0 < share <= 1:
            raise ValueError(f"mask_share {share} must be over 0 and at most 1")
        if min(replace) < 0 or sum(replace) > 1:
            raise ValueError(f"replace {replace} must be two probabilities that add up to at most 1")
        if span is not None and span < 1:
            raise ValueError(f"span {span} must be at least 1 token")
        self.share, self.replace, self.span = share, replace, span
        self.mask = tokenizer.mask
        self.special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self.special[list(tokenizer.special)] = True
        self.ordinary = np.flatnonzero(~self.special)

    def hide(self, ids: ndarray, rng: np.random.Generator, where: ndarray | bool = True) -> tuple[ndarray, ndarray]:
        """The ids (B, T) after masking, and (B, T) bool which were chosen, of those `where` alone."""
        chosen = self._choose(~self.special[ids] & where, rng)
        count = int(chosen.sum())
        luck = rng.random(count)
        drawn = self.ordinary[rng.integers(len(self.ordinary), size=count)]
        becomes_mask, becomes_random = self.replace
        kept = np.where(luck < becomes_mask + becomes_random, drawn, ids[chosen])
        hidden = ids.copy()
        hidden[chosen] = np.where(luck < becomes_mask, self.mask, kept)
        return hidden, chosen

    def _choose(self, choosable: ndarray, rng: np.random.Generator) -> ndarray:
        """(B, T) bool, the chosen ones of the choosable."""
        n = choosable.sum(axis=1)  # (B,)
        count = np.floor(n * self.share + rng.random(len(n)))
        count = np.maximum(count, n > 0)
        turn = rng.random(choosable.shape)  # the lowest are chosen
        if self.span is not None:
            turn = span_turns(turn, rng.geometric(1 / self.span, choosable.shape), choosable)
        turn = np.where(choosable, turn, np.inf)
        rank = turn.argsort(axis=1, kind="stable").argsort(axis=1)
        return rank < count[:, None]


def span_turns(turn: ndarray, lengths: ndarray, choosable: ndarray) -> ndarray:
    """(B, T) turn of each token: the earliest of the spans over it, where one of `lengths` begins at every place."""
    begins = np.where(choosable, turn, np.inf)
    turns = begins.copy()
    for back in range(1, min(int(lengths.max()), turn.shape[1])):
        reaches = np.where(lengths[:, :-back] > back, begins[:, :-back], np.inf)
        turns[:, back:] = np.minimum(turns[:, back:], reaches)
    return turns


# ---------------------------------------------------------------------------------------------------------------------
# rows to be masked


class Rows(NamedTuple):
    """R texts in P parts that are masked independently: windows (P = 1) or pairs (P = 2)."""

    language: ndarray  # (R,) index into the data's `languages`
    number: ndarray  # (R,) of the window, or of the pair, in its split
    place: ndarray  # (R,) how many of its language come before it
    starts: ndarray  # (R, P) where each part begins in the tokens of the split
    sizes: ndarray  # (R, P) how many tokens it has

    def take(self, which: ndarray | slice) -> "Rows":
        return Rows(*(array[which] for array in self))


def for_evaluation(rows: Rows, max_tokens: int | None) -> Rows:
    """The longest first; of about max_tokens tokens: the first of every language, then the second of each and so on."""
    if max_tokens is not None:
        rows = rows.take(rows.place.argsort(kind="stable"))
        tokens = 1 + rows.sizes.sum(axis=1)
        enough = (tokens.cumsum() <= max_tokens).sum()
        rows = rows.take(slice(max(1, enough)))
    return rows.take(np.lexsort((rows.number, -rows.sizes.sum(axis=1))))


def row_ids(data, split: str, starts: ndarray, sizes: ndarray) -> ndarray:
    """(T,): `<s>` and the parts; those of a pair end in `</s>`, wherever they were cut."""
    parts = [np.array([data.tokenizer.bos])]
    for start, size in zip(starts, sizes):
        part = data.tokens[split][start : start + size].astype(np.int64)
        if data.kind == "pairs":
            part[-1] = data.tokenizer.eos
        parts.append(part)
    return np.concatenate(parts)


def padded_rows(data, split: str, rows: Rows, width: int = 0) -> tuple[ndarray, ndarray | None]:
    ids = [row_ids(data, split, starts, sizes) for starts, sizes in zip(rows.starts, rows.sizes)]
    return pad_rows(ids, data.tokenizer.pad, width)


def masked_batch(ids: ndarray, hidden: ndarray, chosen: ndarray, real: ndarray | None, language: ndarray) -> Masked:
    """The batch of rows `ids` (B, T) and what masking made of them; language (B,)."""
    row, _ = chosen.nonzero()  # (M,)
    return Masked(*tensors(hidden, np.flatnonzero(chosen), ids[chosen], real, language[row]))


def training_batch(data, split: str, rows: Rows, rng: np.random.Generator, width: int = 0) -> Masked:
    ids, real = padded_rows(data, split, rows, width)
    places = np.arange(ids.shape[1])
    ends = 1 + rows.sizes.cumsum(axis=1)  # (B, P)
    begins = ends - rows.sizes
    hidden = ids
    chosen = np.zeros(ids.shape, dtype=bool)
    for part in range(rows.sizes.shape[1]):
        where = (places >= begins[:, part, None]) & (places < ends[:, part, None])
        hidden, now = data.masking.hide(hidden, rng, where)
        chosen |= now
    return masked_batch(ids, hidden, chosen, real, rows.language)


def evaluation_batches(
    data, split: str, rows: Rows, maskings: int, rank: int, world: int, masked=(0, 1), shown=(0, 1)
) -> Iterator[tuple[int, int, Masked]]:
    """(k, first, batch): the rows in order, masked in `maskings` ways, batches dealt round-robin to processes.

    k is the masking, `first` the number of the batch's first real token, which the others follow. The masks of a part
    depend on (k, number, part) alone. Of the parts of a row only those in `shown` are there, only those in `masked` are
    masked; where batches begin depends on neither.
    """
    parts = range(rows.sizes.shape[1])
    shown = [part for part in parts if part in shown]
    batches = cut(1 + rows.sizes.sum(axis=1, keepdims=True), data.micro_tokens)
    rows = rows._replace(starts=rows.starts[:, shown], sizes=rows.sizes[:, shown])
    lengths = 1 + rows.sizes.sum(axis=1)
    firsts = lengths.cumsum() - lengths
    for turn in range(rank, maskings * len(batches), world):
        k, batch = divmod(turn, len(batches))
        begin, end = batches[batch]
        some = rows.take(slice(begin, end))
        ids, real = padded_rows(data, split, some)
        hidden = ids.copy()
        chosen = np.zeros(ids.shape, dtype=bool)
        for row, number in enumerate(some.number):
            left = 1
            for part, size in zip(shown, some.sizes[row]):
                if part in masked:
                    here = np.s_[row : row + 1, left : left + size]
                    rng = generator(EVALUATION, k, number, part)
                    hidden[here], chosen[here] = data.masking.hide(ids[here], rng)
                left += size
        yield k, int(firsts[begin]), masked_batch(ids, hidden, chosen, real, some.language)


# ---------------------------------------------------------------------------------------------------------------------
# many languages


class MaskedData(Prepared):
    """A folder of many languages: windows of `<s>` and T - 1 = block_size - 1 tokens of one language each.

    A row's language is drawn by `probabilities` of the training tokens, its window by chance; `mask_share`, `replace`
    and `span` are those of Masking.
    """

    kind, example = "languages", "catalogs"

    def __init__(
        self,
        folder: Path | str,
        block_size: int,
        micro_tokens: int,
        micros_per_step: int = 1,
        seed: int = 0,
        exponent: float = 0.7,
        mask_share: float = 0.15,
        replace: tuple[float, float] = (0.8, 0.1),
        span: float | None = None,
    ):
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed)
        self.masking = Masking(self.tokenizer, mask_share, replace, span)
        self.shares = shares(self.streams, exponent)

    def batch(self, split: str, step: int, micro: int = 0) -> Masked:
        """The rows and masks of one micro-batch, for training; a language shorter than a window gives padded rows."""
        rng = self.random(TRAINING, split, step, micro)
        language = rng.choice(len(self.languages), size=self.batch_size, p=self.shares[split])  # (B,)
        first, size = self.streams[split][language].T
        length = np.minimum(size, self.block_size - 1)
        place = rng.integers(size - length + 1)
        rows = Rows(language, place, place, (first + place)[:, None], length[:, None])
        return training_batch(self, split, rows, rng, width=self.block_size)

    def eval_tokens(self, split: str, max_tokens: int | None = None) -> int:
        """How many tokens `eval_batches` reads in one masking, every window's `<s>` included, padding not."""
        rows = for_evaluation(self._windows(split), max_tokens)
        return int((1 + rows.sizes).sum())

    def eval_batches(
        self, split: str, maskings: int = 10, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[int, int, Masked]]:
        """Every language's text (see for_evaluation) in disjoint windows, as evaluation_batches gives them."""
        rows = for_evaluation(self._windows(split), max_tokens)
        return evaluation_batches(self, split, rows, maskings, rank, world)

    def _windows(self, split: str) -> Rows:
        width = self.block_size - 1
        first, size = self.streams[split].T
        windows = -(-size // width)  # (J,), the last one may be shorter
        language = np.repeat(np.arange(len(windows)), windows)
        number = np.arange(len(language))
        place = number - (windows.cumsum() - windows)[language]
        starts = first[language] + place * width
        sizes = np.minimum(width, size[language] - place * width)
        return Rows(language, number, place, starts[:, None], sizes[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# pairs


def text_places(index: ndarray, pairs: ndarray, swap: ndarray | bool = False) -> tuple[ndarray, ndarray]:
    """(B, 2) where the two texts of each pair begin and how many tokens they have, `</s>` included; swap: (B,)."""
    second = np.array([0, 1]) != np.reshape(swap, (-1, 1))
    texts = 2 * pairs[:, None] + second
    return index[texts], index[texts + 1] - index[texts]


class PairData(Prepared):
    """A folder of translation pairs: rows `<s> first </s> second </s>` of at most block_size tokens, masked.

    Where a row would be longer, the longer half is cut first. Languages are pairs of them, drawn by `probabilities` of
    the training pairs, and a pair by chance; the halves are masked independently, see Masking.
    """

    kind, example = "pairs", "catalogs-pairs"

    def __init__(
        self,
        folder: Path | str,
        block_size: int,
        micro_tokens: int,
        micros_per_step: int = 1,
        seed: int = 0,
        exponent: float = 0.7,
        mask_share: float = 0.15,
        replace: tuple[float, float] = (1.0, 0.0),
        span: float | None = None,
    ):
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed)
        self.masking = Masking(self.tokenizer, mask_share, replace, span)
        self.shares = shares(self.streams, exponent)
        self._pool = lru_cache(maxsize=1)(self._draw_pool)

    def batch(self, split: str, step: int, micro: int = 0) -> Masked:
        """The rows and masks of one micro-batch of pairs of like lengths, for training."""
        pool, place = divmod(step * self.micros_per_step + micro, POOL_MICROS)
        rng = self.random(TRAINING, split, step, micro)
        return training_batch(self, split, self._pool(split, pool)[place], rng)

    def _draw_pool(self, split: str, number: int) -> list[Rows]:
        """POOL_MICROS micro-batches: drawn pairs, sorted by length, cut, and shuffled.

        As many pairs are drawn as would fill the pool without padding, so there are always enough; the surplus is
        thrown away. All micro-batches are as likely to be thrown away, of short pairs or long, and it costs no more
        than the share of padding.
        """
        rng = self.random(POOL, split, number)
        language = pairs = np.empty(0, dtype=np.int64)
        tokens = 0
        while tokens < POOL_MICROS * self.micro_tokens:
            drawn = rng.choice(len(self.languages), size=DRAWN, p=self.shares[split])
            first, count = self.streams[split][drawn].T
            language = np.concatenate([language, drawn])
            pairs = np.concatenate([pairs, first + rng.integers(count)])
            rows = self._rows(split, language, pairs)
            tokens = len(pairs) + rows.sizes.sum()
        rows = rows.take(rows.sizes.sum(axis=1).argsort(kind="stable"))
        micros = cut(1 + rows.sizes.sum(axis=1, keepdims=True), self.micro_tokens)
        return [rows.take(slice(*micro)) for micro in rng.permutation(micros)[:POOL_MICROS]]

    def eval_tokens(self, split: str, max_tokens: int | None = None) -> int:
        """How many tokens `eval_batches` reads in one masking, `<s>` and `</s>` included, padding not."""
        rows = for_evaluation(self._all_pairs(split), max_tokens)
        return len(rows.number) + int(rows.sizes.sum())

    def eval_batches(
        self,
        split: str,
        maskings: int = 10,
        max_tokens: int | None = None,
        rank: int = 0,
        world: int = 1,
        only: int | None = None,
        context: bool = True,
    ) -> Iterator[tuple[int, int, Masked]]:
        """Every pair (see for_evaluation), as evaluation_batches gives them.

        With `only` 0 or 1 that half alone is masked, as otherwise; without context the rows are then `<s> half </s>`,
        row for row the same texts under the same masks, so that the two losses tell what the translation helps.
        """
        if not context and only is None:
            raise ValueError("without context only one half is there: context=False goes with only=0 or only=1")
        masked = (0, 1) if only is None else (only,)
        shown = (0, 1) if context else masked
        rows = for_evaluation(self._all_pairs(split), max_tokens)
        return evaluation_batches(self, split, rows, maskings, rank, world, masked, shown)

    def _all_pairs(self, split: str) -> Rows:
        count = self.streams[split][:, 1]
        language = np.repeat(np.arange(len(count)), count)
        return self._rows(split, language, np.arange(len(language)))

    def _rows(self, split: str, language: ndarray, pairs: ndarray) -> Rows:
        """The longer half of a pair is cut first, until the row is a block."""
        starts, sizes = text_places(self.index[split], pairs)
        one, two = sizes.T
        room = self.block_size - 1
        one = np.minimum(one, np.maximum(room - two, room - room // 2))
        two = np.minimum(two, room - one)
        place = pairs - self.streams[split][language, 0]
        return Rows(language, pairs, place, starts, np.stack([one, two], axis=1))


# ---------------------------------------------------------------------------------------------------------------------
# translation


class Translation(NamedTuple):
    """B pairs; flat positions count through all B * N, or B * T, ascending, None where there is no padding."""

    source: Tensor  # (B, N) each text and its </s>
    source_real: Tensor | None  # (S,) flat positions of what is not padding
    target: Tensor  # (B, T) <s> and the translation: what the decoder reads
    target_real: Tensor | None  # (M,)
    labels: Tensor  # (M,) what stands behind each of them: the translation and its </s>

    @property
    def tokens(self) -> int:
        """Without padding, of both sides."""
        source = self.source.numel() if self.source_real is None else len(self.source_real)
        return source + len(self.labels)


class TranslationData(Prepared):
    """A folder of translation pairs, to be translated into `target`, whichever half of a pair that is.

    Training goes through the pairs in passes: every pair once, each pass in its own order. With another `exponent` than
    1 a pass has as many pairs, but of each language (pair) as `probabilities` says; what one pass leaves out of a large
    language the next begins with, and a small one comes round several times. Pairs with more than block_size tokens on
    a side, `</s>` included, are left out in training and of the loss; `left_out` counts them by split. ValueError where
    a language pair has no half in `target`, and where no training pair of it, or no held-out pair at all, is left.
    """

    kind, example = "pairs", "catalogs-en"

    def __init__(
        self,
        folder: Path | str,
        block_size: int,
        micro_tokens: int,
        micros_per_step: int = 1,
        seed: int = 0,
        exponent: float = 1.0,
        target: str = "en",
    ):
        if micro_tokens < 2 * block_size:
            what = f"must hold a pair of two times block_size {block_size} tokens"
            raise ValueError(f"micro_tokens {micro_tokens} {what}")
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed)
        for name in self.languages:
            if not name.startswith(f"{target}-") and not name.endswith(f"-{target}"):
                pairs = ", ".join(self.languages[:8])
                raise ValueError(f"{self.folder} has pairs without the language {target!r}: {pairs}; see --target")
        self.target_first = np.array([not name.endswith(f"-{target}") for name in self.languages])  # (J,)
        self.exponent = exponent
        self.fitting = {split: self._fitting(split) for split in SPLITS}  # split -> the pairs of each language
        self.left_out = {}
        for split, fitting in self.fitting.items():
            left = sum(len(pairs) for pairs in fitting)
            self.left_out[split] = self.meta["splits"][split]["pairs"] - left
        self._pass = lru_cache(maxsize=2)(self._order_pass)  # the first, which says how many a pass has, and the last

    def _fitting(self, split: str) -> list[ndarray]:
        """The pairs of each language that are not too long."""
        fitting = []
        for first, count in self.streams[split].tolist():
            pairs = np.arange(first, first + count)
            longest = self._sizes(split, pairs).max(axis=1)
            fitting.append(pairs[longest <= self.block_size])
        none_left = [name for name, pairs in zip(self.languages, fitting) if not len(pairs)]
        if len(none_left) == len(fitting) or (split == "train" and none_left):
            what = f"all {split} pairs of {none_left[0]} in {self.folder}"
            raise ValueError(f"{what} are longer than block_size {self.block_size} tokens")
        return fitting

    def batch(self, split: str, step: int, micro: int = 0) -> Translation:
        """One micro-batch, for training: pairs of like lengths, micro_tokens on both sides with their padding."""
        micros_per_pass = len(self._pass(split, 0))
        number, place = divmod(step * self.micros_per_step + micro, micros_per_pass)
        micros = self._pass(split, number)
        # with an exponent one pass may have a few micro-batches more than the first, or less: skip or repeat those
        return self._translation(split, micros[place % len(micros)])

    def _order_pass(self, split: str, number: int) -> list[ndarray]:
        """The micro-batches of a pass, (B,) pairs each: shuffled, sorted by length, cut, shuffled again.

        This looks at all pairs of the corpus at once: some 2 s and 200 MB for each million, once in a pass.
        """
        rng = self.random(PASS, split, number)
        sizes = np.array([len(own) for own in self.fitting[split]])
        taken = np.rint(probabilities(sizes, sizes, self.exponent) * sizes.sum())
        taken = np.maximum(taken, sizes > 0).astype(np.int64)
        pairs = []
        for own, count in zip(self.fitting[split], taken):
            places = np.arange(number * count, (number + 1) * count)
            pairs.append(own[places % max(1, len(own))])
        pairs = rng.permutation(np.concatenate(pairs))
        pairs = pairs[by_both_lengths(self._sizes(split, pairs))]
        micros = cut(self._sizes(split, pairs), self.micro_tokens)
        return [pairs[begin:end] for begin, end in rng.permutation(micros)]

    def eval_batches(
        self, split: str, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[Translation]:
        """Every pair that is not too long, batches dealt round-robin to processes; max_tokens: as in for_evaluation."""
        pairs = np.concatenate(self.fitting[split])
        if max_tokens is not None:
            places = np.concatenate([np.arange(len(own)) for own in self.fitting[split]])
            pairs = pairs[places.argsort(kind="stable")]
            enough = (self._sizes(split, pairs).sum(axis=1).cumsum() <= max_tokens).sum()
            pairs = pairs[: max(1, enough)]
        pairs = pairs[by_both_lengths(self._sizes(split, pairs))]
        batches = cut(self._sizes(split, pairs), self.micro_tokens)
        for begin, end in batches[rank::world]:
            yield self._translation(split, pairs[begin:end])

    def texts(self, split: str, language: str) -> tuple[list[str], list[str]]:
        """Sources and translations as they were written, of the held-out pairs of that pair of languages."""
        path = self.folder / f"{split}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {prepare_again(self.meta)}")
        own = self.pairs_of(split, language)
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, own.start, own.stop)]
        source = int(self.target_first[self.languages.index(language)])
        return [row[source] for row in rows], [row[1 - source] for row in rows]

    def _places(self, split: str, pairs: ndarray) -> tuple[ndarray, ndarray]:
        """(B, 2) where source and translation begin and how many tokens they have, `</s>` included."""
        language = self.streams[split][:, 0].searchsorted(pairs, side="right") - 1
        return text_places(self.index[split], pairs, swap=self.target_first[language])

    def _sizes(self, split: str, pairs: ndarray) -> ndarray:
        _, sizes = self._places(split, pairs)
        return sizes

    def _translation(self, split: str, pairs: ndarray) -> Translation:
        tokens = self.tokens[split]
        starts, sizes = self._places(split, pairs)
        sources, read, written = [], [], []
        for (source, target), (n, t) in zip(starts, sizes):
            sources.append(tokens[source : source + n])
            read.append(np.append(self.tokenizer.bos, tokens[target : target + t - 1]))
            written.append(tokens[target : target + t])
        source, source_real = pad_rows(sources, self.tokenizer.pad)
        target, target_real = pad_rows(read, self.tokenizer.pad)
        labels = np.concatenate(written).astype(np.int64)
        return Translation(*tensors(source, source_real, target, target_real, labels))


def by_both_lengths(sizes: ndarray) -> ndarray:
    """The order by source, and within a length by translation, up and down in turns, so that neighbours are alike."""
    source, target = sizes.T
    up_and_down = np.where(source % 2, target, -target)
    return np.lexsort((up_and_down, -source))


def source_batches(ids: list[list[int]], pad: int, eos: int, micro_tokens: int) -> Iterator[tuple[list[int], tuple]]:
    """Sources to translate, longest first: their numbers, and (source (B, N), source_real (S,) or None).

    micro_tokens holds them with their padding; the order depends on nothing but the lengths.
    """
    order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    rows = [np.array([*ids[number], eos]) for number in order]
    lengths = np.array([len(row) for row in rows])
    for begin, end in cut(lengths[:, None], micro_tokens):
        yield order[begin:end], tuple(tensors(*pad_rows(rows[begin:end], pad)))
