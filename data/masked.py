"""Masked batches from a prepared corpus of many languages, as a pure function of (seed, split, step, micro).

Micro-batch m of step s holds samples (s * micros_per_step + m) * B ... + B - 1 of one endless sequence. A sample is the
next window of a language that is drawn for it, larger ones more often, but less so than their size would have it. Masks
depend on (seed, step, micro) in training; in evaluation they are the same for everyone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.tokens import Prepared, again

ROUND = 16_384  # samples in which the languages have their shares
GOLDEN = (5**0.5 - 1) / 2
# what random numbers are for; their keys begin with it, so that no two purposes share a key
ORDER, WINDOWS, MASKS, EVALUATION, PAIR_ORDER, PAIR_CUTS, PAIR_MASKS, PAIR_EVALUATION = range(8)


class Masked(NamedTuple):
    """B rows of T tokens, each `<s>` and text of one language (pair); flat positions count through all B * T."""

    ids: torch.Tensor  # (B, T) after masking
    masked: torch.Tensor  # (M,) flat positions of the tokens to predict, ascending
    targets: torch.Tensor  # (M,) what stood there
    real: torch.Tensor | None  # (S,) flat positions of what is not padding, ascending; None: all of them
    language: torch.Tensor  # (M,) index into the data's `languages`


def mask_tokens(
    ids: np.ndarray,
    choosable: np.ndarray,
    rng: np.random.Generator,
    share: float,
    mask: int,
    ordinary: np.ndarray,
    replace: tuple[float, float] = (0.8, 0.1),
    span: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose a share of each row's tokens and hide them; returns the new ids and the flat positions (M,), ascending.

    ids (B, T); choosable (B, T) bool. Of n choosable tokens n * share are chosen, rounded up or down at random so that
    the mean is exact, but at least one if there is any. `replace` holds the probabilities of becoming `mask` and of
    becoming one of the `ordinary` ids; otherwise a chosen token stays as it is. The tokens are chosen uniformly, or,
    with `span`, in spans of geometric length with that mean, in random places, until there are enough; the last is cut.
    """
    n = choosable.sum(axis=1)  # (B,)
    count = np.maximum((n * share + rng.random(len(n))).astype(np.int64), n > 0)
    turn = rng.random(ids.shape)  # the lowest are chosen
    if span is not None:
        turn = span_turns(np.where(choosable, turn, 2.0), rng.geometric(1 / span, ids.shape))
    order = np.where(choosable, turn, 2.0).argsort(axis=1, kind="stable")  # what cannot be chosen comes last
    chosen = np.zeros(ids.shape, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(ids.shape[1]) < count[:, None], axis=1)
    positions = np.flatnonzero(chosen)
    original, luck = ids.ravel()[positions], rng.random(len(positions))
    drawn = ordinary[rng.integers(len(ordinary), size=len(positions))]
    hidden = ids.copy()
    hidden.ravel()[positions] = np.where(luck < replace[0], mask, np.where(luck < sum(replace), drawn, original))
    return hidden, positions


def span_turns(turn: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(B, T) turn of each token: the earliest of the spans over it, where one of `lengths` begins at every place."""
    turns = turn.copy()
    for back in range(1, min(int(lengths.max()), turn.shape[1])):
        reaches = np.where(lengths[:, :-back] > back, turn[:, :-back], 2.0)
        turns[:, back:] = np.minimum(turns[:, back:], reaches)
    return turns


def bounds(sizes: np.ndarray, train: np.ndarray, exponent: float) -> np.ndarray:
    """The probabilities of the languages that have text in a split, added up: (J + 1,) from 0 to 1.

    sizes, train: (J,) what each has there, and in training.
    """
    sums = np.concatenate([[0], np.where(sizes > 0, train ** float(exponent), 0).cumsum()])
    return sums / sums[-1]


class Multilingual(Prepared):
    """A folder of many languages (or pairs of them), drawn in rounds of samples in which each has its share.

    p_j, the probability of language j, is proportional to n_j ** exponent, n_j its training tokens (or pairs); with
    exponent 1 each of these is as likely, with 0 every language. mask_share: of the tokens that are not special;
    replace and span: see mask_tokens. ValueError, in one line, when the folder holds something else or an argument
    makes no sense.
    """

    place, size = "start", "tokens"  # where a language begins in a split and how much it has, in meta.json

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
        if block_size < 8:
            raise ValueError(f"block_size {block_size} must be at least 8 tokens")
        if not 0 < mask_share <= 1:
            raise ValueError(f"mask_share {mask_share} must be over 0 and at most 1")
        if min(replace) < 0 or sum(replace) > 1:
            raise ValueError(f"replace {replace} must be two probabilities that add up to at most 1")
        if span is not None and span < 1:
            raise ValueError(f"span {span} must be at least 1 token")
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed)
        self._check_kind()
        self.mask_share, self.replace, self.span = mask_share, replace, span
        self.languages: list[str] = sorted(self.meta["languages"])
        self.streams = {split: self._streams(split) for split in self.tokens}  # split -> (J, 2) start and tokens
        sizes = {split: streams[:, 1] for split, streams in self.streams.items()}
        self.bounds = {split: bounds(sizes[split], sizes["train"], exponent) for split in sizes}
        self.special = np.zeros(self.vocab_size, dtype=bool)
        self.special[list(self.tokenizer.special)] = True
        self.ordinary = np.flatnonzero(~self.special)
        self._drawn: dict[str, tuple[int, np.ndarray]] = {}
        self._rounds: dict[tuple[str, int], tuple] = {}
        self._passes: dict[tuple[str, int], tuple] = {}

    def _check_kind(self):
        raise NotImplementedError

    def _streams(self, split: str) -> np.ndarray:
        try:
            counts = [self.meta["languages"][language][split] for language in self.languages]
            streams = np.array([[count[self.place], count[self.size]] for count in counts], dtype=np.int64)
            total = self.meta["splits"][split][self.size]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.folder / 'meta.json'} is damaged; {again(self.meta)}") from error
        if len(streams) == 0 or streams.min() < 0 or streams.sum(axis=1).max() > total:
            raise ValueError(f"{self.folder / 'meta.json'} does not fit {split}.bin; {again(self.meta)}")
        return streams

    @property
    def round_size(self) -> int:
        return ROUND

    def quotas(self, split: str, number: int) -> np.ndarray:
        """(J,) samples of each language in round `number`: its share, rounded down or up, together `round_size`.

        Language j gets the integers between two bounds, and the bounds move on with the round: a language of 0.1
        samples a round comes once in about ten, and what a language got in all stays within a few samples of its share.
        """
        shift = number * GOLDEN % 1
        return np.diff(np.floor(shift + self.round_size * self.bounds[split])).astype(np.int64)

    def _index(self, split: str) -> int:
        return list(self.tokens).index(split)

    def _before(self, split: str, number: int) -> np.ndarray:
        """(J,) samples of each language in all rounds before that one."""
        known, drawn = self._drawn.get(split, (0, np.zeros(len(self.languages), dtype=np.int64)))
        if known > number:
            known, drawn = 0, np.zeros_like(drawn)
        for earlier in range(known, number):
            drawn = drawn + self.quotas(split, earlier)
        self._drawn[split] = number, drawn
        return drawn

    def _round(self, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Languages of a round's samples and how many samples before each are of its language, (round_size,) each."""
        quotas, drawn = self.quotas(split, number), self._before(split, number)
        languages = np.repeat(np.arange(len(quotas)), quotas)
        draws = np.arange(self.round_size) + np.repeat(drawn + quotas - quotas.cumsum(), quotas)
        # the draws of a language stay in order, so that it ends one pass before it begins the next
        shuffled = np.random.default_rng((ORDER, self.seed, self._index(split), number)).permutation(languages)
        in_order = np.empty(self.round_size, dtype=np.int64)
        in_order[shuffled.argsort(kind="stable")] = draws
        return shuffled, in_order

    def _mask(
        self, ids: np.ndarray, rng: np.random.Generator, choosable: np.ndarray | bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """mask_tokens for ids (B, T), of those tokens that are not special and, if given, `choosable` (B, T)."""
        choosable = ~self.special[ids] & choosable
        mask, ordinary = self.tokenizer.mask, self.ordinary
        return mask_tokens(ids, choosable, rng, self.mask_share, mask, ordinary, self.replace, self.span)


class MaskedData(Multilingual):
    """A folder of many languages: windows of `<s>` and T - 1 = block_size - 1 tokens of one language each."""

    @property
    def window(self) -> int:
        return self.block_size - 1

    def _check_kind(self):
        hint = "masked language models read one of many: python -m data.prepare catalogs"
        if self.meta.get("kind") == "pairs":
            hint = f"data.pairs.PairData reads it, {hint}"
            raise ValueError(f"{self.folder} holds {self.meta['name']!r}, translation pairs; {hint}")
        if "languages" not in self.meta:
            raise ValueError(f"{self.folder} holds {self.meta['name']!r}, a corpus of one language; {hint}")

    def batch(self, split: str, step: int, micro: int = 0) -> Masked:
        """The rows and masks of one micro-batch, for training; a language shorter than a window gives padded rows."""
        first = (step * self.micros_per_step + micro) * self.batch_size
        samples = [self._sample(split, index) for index in range(first, first + self.batch_size)]
        languages = np.array([language for language, _ in samples])
        windows = [self._window(split, language, draw) for language, draw in samples]
        ids, length = self._rows(split, windows, self.block_size)
        rng = np.random.default_rng((MASKS, self.seed, self._index(split), step, micro))
        hidden, positions = self._mask(ids, rng)
        return pack(ids, hidden, positions, length, languages)

    def eval_tokens(self, split: str, max_tokens: int | None = None) -> int:
        """How many tokens `eval_batches` reads in one masking, every window's `<s>` included, padding not."""
        return int((self._eval_windows(split, max_tokens)[:, 2] + 1).sum())

    def eval_batches(
        self, split: str, maskings: int = 10, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[int, int, Masked]]:
        """Every language's text in disjoint windows, masked in `maskings` ways, batches dealt round-robin to processes.

        Yields (k, first, batch): masking k, and the number of the batch's first real token, which the others follow, in
        an order of all `eval_tokens` that depends on nothing but T. The masks depend on k and the window alone. Windows
        of a length come together and a batch is as wide as its longest. max_tokens takes about that many tokens: the
        first window of every language, then the second of every, and so on.
        """
        windows = self._eval_windows(split, max_tokens)
        firsts = np.concatenate([[0], (windows[:, 2] + 1).cumsum()]).tolist()
        starts = range(0, len(windows), self.batch_size)
        for turn in range(rank, maskings * len(starts), world):
            k, begin = turn // len(starts), starts[turn % len(starts)]
            rows = windows[begin : begin + self.batch_size]
            ids, length = self._rows(split, rows[:, 1:3].tolist(), int(rows[:, 2].max()) + 1)
            hidden, positions = ids.copy(), []
            for row, (size, window) in enumerate(rows[:, 2:].tolist()):
                # one row at a time, without its padding: the masks must not depend on what else is in the batch
                rng = np.random.default_rng((EVALUATION, k, window))
                hidden[row, : size + 1], chosen = self._mask(ids[row : row + 1, : size + 1], rng)
                positions.append(row * ids.shape[1] + chosen)
            yield k, firsts[begin], pack(ids, hidden, np.concatenate(positions), length, rows[:, 0])

    def _sample(self, split: str, index: int) -> tuple[int, int]:
        """The language of sample `index` and how many samples before it are of that language."""
        number, place = divmod(index, self.round_size)
        if (split, number) not in self._rounds:
            # a micro-batch may end one round and begin the next: keep two
            self._rounds = dict(list(self._rounds.items())[-1:])
            self._rounds[split, number] = self._round(split, number)
        languages, draws = self._rounds[split, number]
        return int(languages[place]), int(draws[place])

    def _window(self, split: str, language: int, draw: int) -> tuple[int, int]:
        """Start and length of that draw: its place in its pass's shuffled windows, shifted by the pass's offset."""
        first, size = self.streams[split][language].tolist()
        windows = max(1, size // self.window - 1)  # one fewer than fit, so that every offset leaves the same number
        number, place = divmod(draw, windows)
        known, offset, order = self._passes.get((split, language), (None, 0, None))
        if known != number:
            rng = np.random.default_rng((WINDOWS, self.seed, self._index(split), language, number))
            offset = int(rng.integers(max(1, min(self.window, size - windows * self.window + 1))))
            order = rng.permutation(windows).astype(np.uint32)
            self._passes[split, language] = number, offset, order
        return first + offset + self.window * int(order[place]), min(self.window, size)

    def _eval_windows(self, split: str, max_tokens: int | None) -> np.ndarray:
        """(windows, 4): language, start, tokens and number of every window, sorted by tokens, then number."""
        starts = [np.arange(0, size, self.window) for _, size in self.streams[split]]
        languages = np.repeat(np.arange(len(starts)), [len(part) for part in starts])
        places, (firsts, sizes) = np.concatenate(starts), self.streams[split][languages].T
        tokens = np.minimum(self.window, sizes - places)
        windows = np.stack([languages, firsts + places, tokens, np.arange(len(languages))], axis=1)
        if max_tokens is not None:
            windows = windows[places.argsort(kind="stable")]
            windows = windows[: max(1, int(((windows[:, 2] + 1).cumsum() <= max_tokens).sum()))]
        return windows[np.lexsort((windows[:, 3], windows[:, 2]))]

    def _rows(self, split: str, windows: list[tuple[int, int]], width: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (B, width) of windows (start, tokens), `<s>` before and padding after each; length (B,) with `<s>`."""
        ids = np.full((len(windows), width), self.tokenizer.pad)
        ids[:, 0] = self.tokenizer.bos
        for row, (start, tokens) in enumerate(windows):
            ids[row, 1 : tokens + 1] = self.tokens[split][start : start + tokens]
        return ids, np.array([tokens + 1 for _, tokens in windows])


def pack(
    ids: np.ndarray, hidden: np.ndarray, positions: np.ndarray, length: np.ndarray, languages: np.ndarray
) -> Masked:
    """The batch of rows `ids` and what masking made of them; length and languages (B,)."""
    width = ids.shape[1]
    arrays = hidden, positions, ids.ravel()[positions], real_positions(length, width), languages[positions // width]
    return Masked(*(None if array is None else torch.from_numpy(array) for array in arrays))


def real_positions(lengths: np.ndarray, width: int) -> np.ndarray | None:
    """Flat positions (S,), in rows of that width, of what is not padding; None if nothing is."""
    return None if lengths.min() == width else np.flatnonzero(np.arange(width) < lengths[:, None])
