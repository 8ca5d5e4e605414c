"""Batches of sources and translations from a prepared corpus of pairs, a pure function of (seed, split, step, micro).

As in data.pairs, the pairs of a round are sorted by length and cut into micro-batches, and these are shuffled. Here a
micro-batch holds at most micro_tokens tokens of both sides with their padding, and the sorting is by both lengths.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.masked import bounds, real_positions
from data.pairs import PairData
from data.tokens import again

PART = 1 << 20  # pairs whose lengths are looked at together


class Translation(NamedTuple):
    """B pairs; flat positions count through all B * N, or B * T, ascending, None where there is no padding."""

    source: torch.Tensor  # (B, N) each text and its </s>
    source_real: torch.Tensor | None  # (S,) flat positions of what is not padding
    target: torch.Tensor  # (B, T) <s> and the translation: what the decoder reads
    target_real: torch.Tensor | None  # (M,)
    labels: torch.Tensor  # (M,) what stands behind each of them: the translation and its </s>

    @property
    def tokens(self) -> int:
        """Without padding, of both sides."""
        source = self.source.numel() if self.source_real is None else len(self.source_real)
        return source + len(self.labels)


class TranslationData(PairData):
    """A folder of translation pairs, to be translated into `target`, whichever half of a pair that is.

    Pairs with more than block_size tokens on a side, `</s>` included, are left out in training and of the loss;
    `left_out` counts them by split. ValueError where a pair of languages has no half in `target`, and where no training
    pair of it, or no held-out pair at all, is left.
    """

    reader, corpus = "TranslationData", "catalogs-en"

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
            raise ValueError(
                f"micro_tokens {micro_tokens} must hold a pair of two times block_size {block_size} tokens"
            )
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed, exponent)
        for name in self.languages:
            if not name.endswith(f"-{target}") and not name.startswith(f"{target}-"):
                pairs = ", ".join(self.languages[:8])
                raise ValueError(f"{self.folder} has pairs without the language {target!r}: {pairs}; see --target")
        self.reverse = np.array(
            [not name.endswith(f"-{target}") for name in self.languages]
        )  # (J,) it is the first half
        sizes = {split: self._leave_out(split) for split in self.tokens}  # split -> (J,) pairs that are left
        self.left_out = {split: int((streams[:, 1] - sizes[split]).sum()) for split, streams in self.streams.items()}
        for split, streams in self.streams.items():
            gone = (streams[:, 1] > 0) & (sizes[split] == 0)
            if gone.any() and (split == "train" or not sizes[split].any()):
                what = f"all {split} pairs of {self.languages[gone.argmax()]} in {self.folder}"
                raise ValueError(f"{what} are longer than block_size {self.block_size} tokens")
            self.bounds[split] = bounds(sizes[split], sizes["train"], exponent)
        self._round_size = min(super().round_size, int(sizes["train"].sum()))

    @property
    def round_size(self) -> int:
        """At most a pass: two of them sorted together would put a pair's copies side by side."""
        return self._round_size

    def _leave_out(self, split: str) -> np.ndarray:
        """Fills `kept` where pairs are too long; (J,) how many are not."""
        sizes = self.streams[split][:, 1].copy()
        for language, (first, size) in enumerate(self.streams[split].tolist()):
            fits = np.ones(size, dtype=bool)
            for begin in range(0, size, PART):
                pairs = np.arange(first + begin, first + min(begin + PART, size))
                fits[begin : begin + PART] = self._sizes(split, pairs).max(axis=1) <= self.block_size
            if not fits.all():
                self.kept[split, language] = np.flatnonzero(fits).astype(np.uint32)
                sizes[language] = len(self.kept[split, language])
        return sizes

    def batch(self, split: str, step: int, micro: int = 0) -> Translation:
        """One micro-batch, for training."""
        _, pairs, _ = self._micro(split, step * self.micros_per_step + micro)
        return self._pack(split, pairs)

    def eval_batches(
        self, split: str, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[Translation]:
        """Every pair that is not too long, batches dealt round-robin to processes.

        max_tokens takes about that many tokens: the first pair of every language, then the second of each, and so on.
        """
        _, pairs, sizes = self._eval_pairs(split, max_tokens)
        order, cuts = self._arranged(sizes)
        for number in range(rank, len(cuts) - 1, world):
            yield self._pack(split, pairs[order[cuts[number] : cuts[number + 1]]])

    def texts(self, split: str, language: str) -> tuple[list[str], list[str]]:
        """Sources and translations as they were written, of the held-out pairs of that pair of languages."""
        number = self.languages.index(language)
        path, (first, size) = self.folder / f"{split}.jsonl", self.streams[split][number].tolist()
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {again(self.meta)}")
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for i, line in enumerate(file) if first <= i < first + size]
        half = int(self.reverse[number])
        return [row[half] for row in rows], [row[1 - half] for row in rows]

    def _sizes(self, split: str, pairs: np.ndarray) -> np.ndarray:
        """(B, 2) tokens of source and translation, each with its </s>; nothing is cut."""
        starts = self._starts(split, pairs)
        return starts[:, :, 1] - starts[:, :, 0]

    def _starts(self, split: str, pairs: np.ndarray) -> np.ndarray:
        """(B, 2, 2) where source and translation begin and end."""
        one, two, end = (self.index[split][2 * pairs + i] for i in range(3))
        language = self.streams[split][:, 0].searchsorted(pairs, side="right") - 1
        halves = np.stack([np.stack([one, two], axis=1), np.stack([two, end], axis=1)], axis=1)
        return np.where(self.reverse[language][:, None, None], halves[:, ::-1], halves)

    def _arranged(self, sizes: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """By source, and within a length by translation, up and down in turns, so that neighbours are alike."""
        source, target = sizes.T
        order = np.lexsort((np.where(source % 2, target, -target), -source))
        cuts, N, T = [0], 0, 0
        for row, (n, t) in enumerate(sizes[order].tolist()):
            N, T = n if n > N else N, t if t > T else T
            if (row + 1 - cuts[-1]) * (N + T) > self.micro_tokens:
                cuts.append(row)
                N, T = n, t
        return order, [*cuts, len(order)]

    def _pack(self, split: str, pairs: np.ndarray) -> Translation:
        sides = []
        for half in self._starts(split, pairs).transpose(1, 0, 2).tolist():
            width = max(end - begin for begin, end in half)
            ids = np.full((len(pairs), width), self.tokenizer.pad)
            for row, (begin, end) in zip(ids, half):
                row[: end - begin] = self.tokens[split][begin:end]
            sides.append((ids, real_positions(np.array([end - begin for begin, end in half]), width)))
        (source, source_real), (following, target_real) = sides
        before = np.where(following == self.tokenizer.eos, self.tokenizer.pad, following)[:, :-1]  # nobody reads an end
        target = np.concatenate([np.full((len(pairs), 1), self.tokenizer.bos), before], axis=1)
        labels = following.ravel() if target_real is None else following.ravel()[target_real]
        arrays = source, source_real, target, target_real, labels
        return Translation(*(None if array is None else torch.from_numpy(array) for array in arrays))


def source_batches(ids: list[list[int]], pad: int, eos: int, micro_tokens: int) -> Iterator[tuple[list[int], tuple]]:
    """Sources to translate, longest first: their numbers, and (source (B, N), source_real (S,) or None).

    micro_tokens holds them with their padding; the order depends on nothing but the lengths.
    """
    order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    first = 0
    while first < len(order):
        width = len(ids[order[first]]) + 1
        some = order[first : first + max(1, micro_tokens // width)]
        first += len(some)
        source = np.full((len(some), width), pad)
        for row, number in zip(source, some):
            row[: len(ids[number]) + 1] = [*ids[number], eos]
        real = real_positions(np.array([len(ids[number]) + 1 for number in some]), width)
        yield some, (torch.from_numpy(source), None if real is None else torch.from_numpy(real))
