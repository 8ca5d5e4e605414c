"""Batches from a prepared corpus: a micro-batch is a function of (seed, split, step, micro) and of nothing else.

    TokenData          windows of a text
    MaskedData         windows of one language each, masked
    PairData           pairs of translations, masked
    TranslationData    sources and translations

So a resumed run and any number of processes see the data of one uninterrupted process. Evaluation reads a split in an
order that depends on the data and block_size alone, under masks that depend on the text alone: runs can be compared.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.corpora import CORPORA
from data.files import SPLITS
from data.prepare import checksum, ready, sha256
from data.tokenizers import Tokenizer, load_tokenizer

# What random numbers are for. It begins the key of every generator, so that no two purposes share one.
TRAINING, EVALUATION, POOL, PASS = range(4)
POOL_MICROS = 128  # micro-batches of pairs that are drawn and sorted together
DRAWN = 256  # pairs that are drawn at once
HASHED_UP_TO = 1 << 34  # bytes of a file whose hash is compared: larger ones take minutes
AGAIN = "remove the folder and prepare it again: python -m data.prepare --help says how"


def generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


@dataclass(eq=False)
class Prepared:
    """A folder written by `python -m data.prepare`, its tokens memory-mapped.

    Raises FileNotFoundError or ValueError, in one line, when the folder is missing, damaged or of another kind.
    """

    folder: Path
    block_size: int  # T, tokens of the longest row
    micro_tokens: int  # of a micro-batch, with its padding
    micros_per_step: int = 1
    seed: int = 0

    kind = None  # of the corpora that the class reads, see data.corpora; None: any
    example = "pydocs"

    @classmethod
    def open(cls, name: str, config, context, **options) -> "Prepared":
        """Corpus `name`, or the folder of a prepared one, as a script's config says.

        One that is inside installed packages is prepared here where it is missing.
        """
        folder = ready(name, make=context.rank == 0)
        context.barrier()
        micros = config.batch_tokens // config.micro_tokens
        return cls(folder, config.block_size, config.micro_tokens, micros, config.seed, **options)

    def __post_init__(self):
        if self.block_size < 8:
            raise ValueError(f"block_size {self.block_size} must be at least 8 tokens")
        if self.micro_tokens < self.block_size:
            raise ValueError(f"micro_tokens {self.micro_tokens} must be at least one block of {self.block_size} tokens")
        if self.kind != "pairs" and self.micro_tokens % self.block_size:
            raise ValueError(f"block_size {self.block_size} does not divide micro_tokens {self.micro_tokens}")
        self.batch_size = self.micro_tokens // self.block_size  # B, of rows that are all as long
        self.meta = read_meta(self.folder)
        if self.kind not in (None, self.meta["kind"]):
            what = f"{self.folder} holds {self.meta['name']!r}, a corpus of {self.meta['kind']}"
            hint = f"{type(self).__name__} reads {self.kind}: python -m data.prepare {self.example}"
            raise ValueError(f"{what}; {hint}")
        self.verify()
        self.checksum: str = self.meta["checksum"]
        self.vocab_size: int = self.meta["tokenizer"]["vocab_size"]
        self.languages = sorted(self.meta.get("languages", []))
        unit = "pairs" if self.meta["kind"] == "pairs" else "tokens"
        self.tokens = {}  # split -> (N,)
        self.index = {}  # split -> (2 pairs + 1,), where each text begins; of pairs alone
        self.streams = {}  # split -> (J, 2), where each language begins and how much it has: tokens, or pairs
        for split, total in self.meta["splits"].items():
            self.tokens[split] = self._map(f"{split}.bin", self.meta["dtype"], total["tokens"])
            if unit == "pairs":
                self.index[split] = self._map(f"{split}.idx", "int64", 2 * total["pairs"] + 1)
            own = [self.meta["languages"][language][split] for language in self.languages]
            self.streams[split] = np.array([[counts["first"], counts[unit]] for counts in own], dtype=np.int64)

    def verify(self):
        """ValueError or FileNotFoundError names the first file that is not as it was written."""
        for name, expected in self.meta["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing; {AGAIN}")
            if path.stat().st_size <= HASHED_UP_TO and sha256(path) != expected:
                raise ValueError(f"{path} has changed since it was written; {AGAIN}")

    def _map(self, name: str, dtype: str, count: int) -> ndarray:
        path = self.folder / name
        size, expected = path.stat().st_size, count * np.dtype(dtype).itemsize
        if size != expected:  # a cheap look at what is too large for `verify`
            raise ValueError(f"{path} has {size:,} bytes instead of {expected:,}; {AGAIN}")
        return np.memmap(path, dtype, mode="r").view(ndarray)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def log_frequencies(self) -> Tensor:
        """(V,) how often each token stands in the training text; of a large one, in up to 16 million of its tokens."""
        tokens = self.tokens["train"]
        counts = np.bincount(tokens[:: 1 + len(tokens) // 2**24], minlength=self.vocab_size) + 1.0
        return torch.from_numpy(np.log(counts / counts.sum())).float()

    def random(self, purpose: int, split: str, *key: int) -> np.random.Generator:
        return generator(purpose, self.seed, SPLITS.index(split), *key)

    def pairs(self, split: str, which: ndarray) -> "Rows":
        """Those pairs of a split, by their numbers (R,); the sizes of their texts count the `</s>`."""
        language = self.streams[split][:, 0].searchsorted(which, side="right") - 1
        texts = 2 * which[:, None] + np.array([0, 1])
        starts = self.index[split][texts]
        return Rows(language, starts, self.index[split][texts + 1] - starts)

    def texts(self, split: str, language: str) -> tuple[list[str], list[str]]:
        """First and second texts, as they were written, of the held-out pairs of that pair of languages."""
        first, count = self.streams[split][self.languages.index(language)].tolist()
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            pairs = [json.loads(line) for line in islice(file, first, first + count)]
        return [first for first, _ in pairs], [second for _, second in pairs]


class Rows(NamedTuple):
    """R rows of P texts, which stand anywhere in the tokens of a split: windows (P = 1) or pairs (P = 2)."""

    language: ndarray  # (R,) index into the data's `languages`
    starts: ndarray  # (R, P) where each text begins
    sizes: ndarray  # (R, P) how many tokens it has

    @property
    def lengths(self) -> ndarray:
        """(R,) tokens of a row: `<s>` and its texts."""
        return 1 + self.sizes.sum(axis=1)

    def take(self, which: ndarray | slice) -> "Rows":
        return Rows(*(array[which] for array in self))


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared folder; FileNotFoundError or ValueError when it is missing, damaged or edited."""
    path = folder / "meta.json"
    if not path.is_file():
        how = f"prepare it: python -m data.prepare {folder.name}"
        if folder.name not in CORPORA:
            how = "data/README.md says how to prepare your own by python -m data.prepare"
        raise FileNotFoundError(f"no prepared data in {folder}; {how}")
    try:
        meta = json.loads(path.read_text())
        intact = meta["checksum"] == checksum(meta)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(f"{path} has changed since it was written; {AGAIN}")
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# one language


class TokenData(Prepared):
    """Windows of T = block_size tokens. ValueError when a split is too short for one."""

    def __post_init__(self):
        super().__post_init__()
        for split, tokens in self.tokens.items():
            if len(tokens) <= self.block_size:
                needed = f"block_size {self.block_size} needs {self.block_size + 1:,}"
                raise ValueError(f"{self.folder / split}.bin has {len(tokens):,} tokens and {needed}")

    def batch(self, split: str, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs x and targets y of windows at random places, both (B, T) int64 and y one token ahead."""
        return self._windows(split, self._starts(split, step, micro))

    def _starts(self, split: str, step: int, micro: int) -> ndarray:
        """(B,)"""
        rng = self.random(TRAINING, split, step, micro)
        return rng.integers(len(self.tokens[split]) - self.block_size, size=self.batch_size)

    def seen(self, steps: int) -> Tensor:
        """(N,) bool: which training tokens were targets within so many steps."""
        changes = np.zeros(len(self.tokens["train"]) + 1, dtype=np.int32)
        for step in range(steps):
            for micro in range(self.micros_per_step):
                starts = self._starts("train", step, micro)
                np.add.at(changes, starts + 1, 1)
                np.add.at(changes, starts + 1 + self.block_size, -1)
        return torch.from_numpy(changes[:-1].cumsum() > 0)

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


def places(language: ndarray) -> ndarray:
    """(R,) how many rows of the same language come before each; language: (R,), ascending."""
    return np.arange(len(language)) - language.searchsorted(language)


def evenly(language: ndarray, lengths: ndarray, max_tokens: int | None) -> ndarray:
    """Which rows make up about max_tokens tokens: the first of every language, then the second of each and so on.

    language, lengths: (R,) of all rows, languages ascending. None: all rows.
    """
    if max_tokens is None:
        return np.arange(len(language))
    order = places(language).argsort(kind="stable")
    enough = (lengths[order].cumsum() <= max_tokens).sum()
    return order[: max(1, enough)]


def flat(starts: ndarray, sizes: ndarray) -> ndarray:
    """(N,) the numbers of the tokens of windows that begin at `starts` and have so many tokens, (R,) each."""
    ends = sizes.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)


def pad_rows(tokens: ndarray, lengths: ndarray, pad: int, width: int = 0) -> tuple[ndarray, ndarray | None]:
    """ids (B, T) of rows that stand one behind the other, as wide as the longest or `width`, and where they are real.

    tokens: (N,), lengths: (B,). The second are the flat positions (N,) of what is not padding, None where nothing is.
    """
    real = np.arange(max(width, lengths.max())) < lengths[:, None]  # (B, T)
    ids = np.full(real.shape, pad, dtype=np.int64)
    ids[real] = tokens
    return ids, None if real.all() else np.flatnonzero(real)


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
    """Chooses a share of the tokens of each part and hides them.

    Of n tokens that are not special n * share are chosen, rounded up or down at random so that the mean is exact, but
    at least one if there is any: uniformly, or, with `span`, in spans of geometric length with that mean, in random
    places, until there are enough; the last is cut. `replace` holds the probabilities that a chosen token becomes the
    mask and that it becomes a random token; otherwise it stays as it is.

    Every token draws a turn, and the lowest turns of a part are chosen; a span shares the turn of its first token.
    """

    draws = 5  # random numbers for each token

    def __init__(self, tokenizer: Tokenizer, share: float, replace: tuple[float, float], span: float | None):
        if not 0 < share <= 1:
            raise ValueError(f"mask_share {share} must be over 0 and at most 1")
        if min(replace) < 0 or sum(replace) > 1:
            raise ValueError(f"replace {replace} must be two probabilities that add up to at most 1")
        if span is not None and span <= 1:
            raise ValueError(f"span {span} must be over 1 token")
        self.share, self.replace, self.span = share, replace, span
        self.mask = tokenizer.mask
        self.special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self.special[list(tokenizer.special)] = True
        self.ordinary = np.flatnonzero(~self.special)

    def hide(self, ids: ndarray, part: ndarray, random: ndarray, where: ndarray) -> tuple[ndarray, ndarray]:
        """The ids (N,) after masking, and (N,) bool which were chosen, of those `where` (N,) alone.

        part: (N,) ascending, the part that a token belongs to; random: (draws, N) uniform between 0 and 1.
        """
        turn, length, rounding, luck, other = random
        choosable = where & ~self.special[ids]
        chosen = self._choose(choosable, part, turn, length, rounding)
        becomes_mask, becomes_random = self.replace
        drawn = self.ordinary[(other * len(self.ordinary)).astype(np.int64)]
        kept = np.where(luck < becomes_mask + becomes_random, drawn, ids)
        hidden = np.where(luck < becomes_mask, self.mask, kept)
        return np.where(chosen, hidden, ids), chosen

    def odds(self, shown: Tensor) -> Tensor:
        """By what the weight of a token is multiplied once a chosen place shows it (not normalised); 1 for the mask."""
        becomes_mask, becomes_random = self.replace
        kept = 1 - becomes_mask - becomes_random
        times = 1 + len(self.ordinary) * kept / max(becomes_random, 1e-9)
        return torch.where(shown == self.mask, 1.0, times).double()

    def _choose(self, choosable: ndarray, part: ndarray, turn: ndarray, length: ndarray, rounding: ndarray) -> ndarray:
        """(N,) bool, the chosen ones of the choosable."""
        n = np.bincount(part, choosable)  # of each part
        up = np.empty(len(n))
        up[part] = rounding  # one number for each part will do
        count = np.maximum(np.floor(n * self.share + up), n > 0)
        if self.span is not None:
            lengths = 1 + np.floor(np.log(1 - length) / np.log(1 - 1 / self.span))  # geometric
            turn = span_turns(turn, lengths, choosable, part)
        turn = np.where(choosable, turn, np.inf)
        chosen = np.empty(len(part), dtype=bool)
        chosen[np.lexsort((turn, part))] = places(part) < count[part]  # the lowest turns of each part
        return chosen


def span_turns(turn: ndarray, lengths: ndarray, choosable: ndarray, part: ndarray) -> ndarray:
    """(N,) turn of each token: the earliest of the spans over it, where one of `lengths` begins at every place."""
    begins = np.where(choosable, turn, np.inf)
    turns = begins.copy()
    for back in range(1, min(int(lengths.max()), len(turn))):
        reaches = (lengths[:-back] > back) & (part[:-back] == part[back:])
        turns[back:] = np.minimum(turns[back:], np.where(reaches, begins[:-back], np.inf))
    return turns


@dataclass(eq=False)
class RowData(Prepared):
    """What MaskedData and PairData share: rows whose texts are masked apart, and their evaluation.

    `all_rows(split)`, every text in order, is theirs.
    """

    exponent: float = 0.7  # languages are drawn by `probabilities` of what they have in training
    mask_share: float = 0.15  # this and what follows: see Masking
    replace: tuple[float, float] = (0.8, 0.1)
    span: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self.masking = Masking(self.tokenizer, self.mask_share, self.replace, self.span)
        train = self.streams["train"][:, 1]
        self.shares = {split: probabilities(own[:, 1], train, self.exponent) for split, own in self.streams.items()}

    def eval_tokens(self, split: str, max_tokens: int | None = None) -> int:
        """How many tokens `eval_batches` reads in one masking, without padding."""
        return int(self._eval_rows(split, max_tokens).lengths.sum())

    def eval_batches(
        self,
        split: str,
        maskings: int = 10,
        max_tokens: int | None = None,
        rank: int = 0,
        world: int = 1,
        masked: tuple[int, ...] = (0, 1),
        shown: tuple[int, ...] = (0, 1),
    ) -> Iterator[tuple[int, int, Masked]]:
        """(k, first, batch): all rows (max_tokens: see evenly), longest first, in `maskings` ways.

        Batches are dealt round-robin to processes. k is the masking, `first` the number of the batch's first real
        token, which the others follow. Of the texts of a row only those in `shown` are there, only those in `masked`
        are masked. A text's masks depend on k and on where it begins, and batches are the same whatever is `masked` or
        `shown`, so that losses with and without the translation can be compared.
        """
        rows = self._eval_rows(split, max_tokens)
        batches = cut(rows.lengths[:, None], self.micro_tokens)
        there = [text for text in range(rows.sizes.shape[1]) if text in shown]
        rows = Rows(rows.language, rows.starts[:, there], rows.sizes[:, there])
        firsts = rows.lengths.cumsum() - rows.lengths
        for turn in range(rank, maskings * len(batches), world):
            k, number = divmod(turn, len(batches))
            begin, end = batches[number]
            some = rows.take(slice(begin, end))
            random = self._fixed(k, some)
            yield k, int(firsts[begin]), self._masked(split, some, random, [text in masked for text in there])

    def _eval_rows(self, split: str, max_tokens: int | None) -> Rows:
        rows = self.all_rows(split)
        rows = rows.take(evenly(rows.language, rows.lengths, max_tokens))
        return rows.take(np.lexsort((rows.starts[:, 0], -rows.lengths)))

    def _fixed(self, k: int, rows: Rows) -> ndarray:
        """(draws, N) random numbers for masking k of these rows of N tokens, a text's by where it begins."""
        drawn = []
        for starts, sizes in zip(rows.starts, rows.sizes):
            drawn.append(np.zeros((Masking.draws, 1)))  # `<s>` is never masked
            for start, size in zip(starts, sizes):
                drawn.append(generator(EVALUATION, k, start).random((Masking.draws, size)))
        return np.concatenate(drawn, axis=1)

    def _masked(self, split: str, rows: Rows, random: ndarray, masked: list[bool], width: int = 0) -> Masked:
        """The batch of these rows of N tokens; random: (draws, N), masked: (P,) whether a text is."""
        sizes = np.insert(rows.sizes, 0, 1, axis=1)  # `<s>` is a text, too
        starts = np.insert(rows.starts, 0, 0, axis=1)
        tokens = self.tokens[split][flat(starts.flatten(), sizes.flatten())].astype(np.int64)  # (N,)
        ends = sizes.cumsum().reshape(sizes.shape)
        tokens[ends[:, 0] - 1] = self.tokenizer.bos
        if self.kind == "pairs":
            tokens[ends[:, 1:] - 1] = self.tokenizer.eos  # wherever a text was cut
        part = np.repeat(np.arange(sizes.size), sizes.flatten())
        where = np.tile([False, *masked], len(sizes))[part]
        hidden, chosen = self.masking.hide(tokens, part, random, where)
        ids, real = pad_rows(hidden, rows.lengths, self.tokenizer.pad, width)
        positions = np.arange(ids.size) if real is None else real
        language = np.repeat(rows.language, rows.lengths)
        return Masked(*tensors(ids, positions[chosen], tokens[chosen], real, language[chosen]))


class MaskedData(RowData):
    """A folder of many languages: windows of `<s>` and T - 1 = block_size - 1 tokens of one language each.

    A row's language is drawn by `probabilities` of the training tokens, its window by chance.
    """

    kind, example = "languages", "catalogs"

    def batch(self, split: str, step: int, micro: int = 0) -> Masked:
        """The rows and masks of one micro-batch, for training; a language shorter than a window gives padded rows."""
        rng = self.random(TRAINING, split, step, micro)
        language = rng.choice(len(self.languages), size=self.batch_size, p=self.shares[split])  # (B,)
        first, size = self.streams[split][language].T
        length = np.minimum(size, self.block_size - 1)
        start = first + rng.integers(size - length + 1)
        rows = Rows(language, start[:, None], length[:, None])
        random = rng.random((Masking.draws, rows.lengths.sum()))
        return self._masked(split, rows, random, [True], width=self.block_size)

    def all_rows(self, split: str) -> Rows:
        """Every language's text in disjoint windows, the last of which may be shorter."""
        width = self.block_size - 1
        first, size = self.streams[split].T
        language = np.repeat(np.arange(len(size)), -(-size // width))
        before = width * places(language)
        starts = first[language] + before
        sizes = np.minimum(width, size[language] - before)
        return Rows(language, starts[:, None], sizes[:, None])


class PairData(RowData):
    """A folder of translation pairs: rows `<s> first </s> second </s>` of at most block_size tokens, masked.

    Where a row would be longer, the longer half is cut first. Languages are pairs of them, drawn by `probabilities` of
    the training pairs, and a pair by chance; the halves are masked independently, see Masking.
    """

    kind, example = "pairs", "catalogs-pairs"

    def __post_init__(self):
        super().__post_init__()
        self._pool = lru_cache(maxsize=1)(self._draw_pool)

    def batch(self, split: str, step: int, micro: int = 0) -> Masked:
        """The rows and masks of one micro-batch of pairs of like lengths, for training."""
        pool, place = divmod(step * self.micros_per_step + micro, POOL_MICROS)
        rows = self._pool(split, pool)[place]
        random = self.random(TRAINING, split, step, micro).random((Masking.draws, rows.lengths.sum()))
        return self._masked(split, rows, random, [True, True])

    def _draw_pool(self, split: str, number: int) -> list[Rows]:
        """POOL_MICROS micro-batches: drawn pairs, sorted by length, cut, and shuffled.

        As many pairs are drawn as would fill the pool without padding, so there are always enough; the surplus is
        thrown away. All micro-batches are as likely to be thrown away, of short pairs or long, and it costs no more
        than the share of padding.
        """
        rng = self.random(POOL, split, number)
        parts, tokens = [], 0
        while tokens < POOL_MICROS * self.micro_tokens:
            drawn = rng.choice(len(self.languages), size=DRAWN, p=self.shares[split])
            first, count = self.streams[split][drawn].T
            parts.append(self.pairs(split, first + rng.integers(count)))
            tokens += parts[-1].lengths.sum()
        rows = Rows(*map(np.concatenate, zip(*parts)))
        rows = rows.take(rows.lengths.argsort(kind="stable"))
        micros = cut(rows.lengths[:, None], self.micro_tokens)
        return [rows.take(slice(*micro)) for micro in rng.permutation(micros)[:POOL_MICROS]]

    def all_rows(self, split: str) -> Rows:
        return self.pairs(split, np.arange(self.meta["splits"][split]["pairs"]))

    def pairs(self, split: str, which: ndarray) -> Rows:
        """Where a row would be longer than a block its longer half is cut, until it is not."""
        rows = super().pairs(split, which)
        one, two = rows.sizes.T
        room = self.block_size - 1
        one = np.minimum(one, np.maximum(room - two, room - room // 2))
        two = np.minimum(two, room - one)
        return rows._replace(sizes=np.stack([one, two], axis=1))


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


@dataclass(eq=False)
class TranslationData(Prepared):
    """A folder of translation pairs, to be translated into `target`, whichever half of a pair that is.

    Training goes through the pairs in passes: every pair once, each pass in its own order. With another `exponent` than
    1 a pass has as many pairs, but of each language (pair) as `probabilities` says; what one pass leaves out of a large
    language the next begins with, and a small one comes round several times. Pairs with more than block_size tokens on
    a side, `</s>` included, are left out in training and of the loss; `left_out` counts them by split. ValueError where
    a language pair has no half in `target`, and where no training pair of it, or no held-out pair at all, is left.
    """

    exponent: float = 1.0  # languages are drawn by `probabilities` of their pairs
    target: str = "en"

    kind, example = "pairs", "catalogs-en"

    def __post_init__(self):
        if self.micro_tokens < 2 * self.block_size:
            what = f"must hold a pair of two times block_size {self.block_size} tokens"
            raise ValueError(f"micro_tokens {self.micro_tokens} {what}")
        super().__post_init__()
        for name in self.languages:
            if not name.startswith(f"{self.target}-") and not name.endswith(f"-{self.target}"):
                pairs = ", ".join(self.languages[:8])
                raise ValueError(f"{self.folder} has pairs without the language {self.target!r}: {pairs}; see --target")
        self.target_first = np.array([not name.endswith(f"-{self.target}") for name in self.languages])  # (J,)
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
            fits = (self.pairs(split, pairs).sizes <= self.block_size).all(axis=1)
            fitting.append(pairs[fits])
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
            turns = np.arange(number * count, (number + 1) * count)
            pairs.append(own[turns % max(1, len(own))])
        micros = self._micros(split, rng.permutation(np.concatenate(pairs)))
        return [micros[place] for place in rng.permutation(len(micros))]

    def eval_batches(
        self, split: str, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[Translation]:
        """Every pair that is not too long (max_tokens: see evenly), batches dealt round-robin to processes."""
        pairs = np.concatenate(self.fitting[split])
        rows = self.pairs(split, pairs)
        pairs = pairs[evenly(rows.language, rows.sizes.sum(axis=1), max_tokens)]
        for own in self._micros(split, pairs)[rank::world]:
            yield self._translation(split, own)

    def texts(self, split: str, language: str) -> tuple[list[str], list[str]]:
        """Sources and translations, as they were written, of the held-out pairs of that pair of languages."""
        both = super().texts(split, language)
        return both[::-1] if self.target_first[self.languages.index(language)] else both

    def translation_counts(self, split: str) -> dict[str, int]:
        """`tokens` (with `</s>`) and `bytes` of all translations of a held-out split."""
        pairs = np.arange(self.meta["splits"][split]["pairs"])
        tokens = self.pairs(split, pairs).sizes[:, 1].sum()
        size = 0
        for language in self.languages:
            size += sum(len(text.encode()) for text in self.texts(split, language)[1])
        return {"tokens": int(tokens), "bytes": size}

    def _micros(self, split: str, pairs: ndarray) -> list[ndarray]:
        """These pairs in batches of like lengths: longest sources first, and of equal ones, translations up and down.

        In turns, from one length of the source to the next, so that neighbours are alike.
        """
        sizes = self.pairs(split, pairs).sizes
        source, target = sizes.T
        up_and_down = np.where(source % 2, target, -target)
        order = np.lexsort((up_and_down, -source))
        return [pairs[order[begin:end]] for begin, end in cut(sizes[order], self.micro_tokens)]

    def pairs(self, split: str, which: ndarray) -> Rows:
        """The source first, whichever half of a pair that is."""
        rows = super().pairs(split, which)
        swap = self.target_first[rows.language, None]
        starts = np.where(swap, rows.starts[:, ::-1], rows.starts)
        return Rows(rows.language, starts, np.where(swap, rows.sizes[:, ::-1], rows.sizes))

    def _translation(self, split: str, pairs: ndarray) -> Translation:
        tokens, pad = self.tokens[split], self.tokenizer.pad
        rows = self.pairs(split, pairs)
        (starts, after), (n, t) = rows.starts.T, rows.sizes.T
        source, labels = tokens[flat(starts, n)], tokens[flat(after, t)].astype(np.int64)
        read = np.roll(labels, 1)
        read[t.cumsum() - t] = self.tokenizer.bos  # in place of the `</s>` before
        source, source_real = pad_rows(source, n, pad)
        target, target_real = pad_rows(read, t, pad)
        return Translation(*tensors(source, source_real, target, target_real, labels))


def source_batches(ids: list[list[int]], pad: int, eos: int, micro_tokens: int) -> Iterator[tuple[list[int], tuple]]:
    """Sources to translate, longest first: their numbers, and (source (B, N), source_real (S,) or None).

    micro_tokens holds them with their padding; the order depends on nothing but the lengths.
    """
    order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    rows = [np.array([*ids[number], eos]) for number in order]
    lengths = np.array([len(row) for row in rows])
    for begin, end in cut(lengths[:, None], micro_tokens):
        batch = pad_rows(np.concatenate(rows[begin:end]), lengths[begin:end], pad)
        yield order[begin:end], tuple(tensors(*batch))
