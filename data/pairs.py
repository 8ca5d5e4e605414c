"""Masked batches of translation pairs from a prepared corpus of them, a pure function of (seed, split, step, micro).

A row is `<s> first </s> second </s>`, padded to the longest of its batch. The pairs of a round (see data.masked), or of
some where micro-batches are large, are sorted by length and cut into micro-batches that hold at most micro_tokens
tokens with their padding, and these are shuffled: micro-batch m of step s is number s * micros_per_step + m of the
endless sequence of them.
"""

import difflib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.masked import PAIR_CUTS, PAIR_EVALUATION, PAIR_MASKS, PAIR_ORDER, Masked, Multilingual, pack
from data.tokens import again

PER_ROUND = 16_384  # micro_tokens for each round that is sorted at once: about a dozen micro-batches or more


class PairData(Multilingual):
    """A folder of translation pairs; a row has at most block_size tokens, both halves cut if it must be.

    Languages are pairs of them, `language` of a batch an index into `languages`, and p_j goes by training pairs.
    """

    place, size, reader, corpus = "first", "pairs", "PairData", "catalogs-pairs"

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
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed, exponent, mask_share, replace, span)
        self.micro_tokens, self.rounds = micro_tokens, 1 + micro_tokens // PER_ROUND
        self.index = {split: self._index_of(split) for split in self.tokens}  # split -> (2 pairs + 1,)
        # (split, language) -> the pairs to draw, counted from its first, where these are not all
        self.kept: dict[tuple[str, int], np.ndarray] = {}
        self._micros = {split: [0] for split in self.tokens}  # split -> micro-batches before each sorting

    def _check_kind(self):
        if self.meta.get("kind") != "pairs":
            other = "MaskedData" if "languages" in self.meta else "TokenData"
            hint = f"{other} reads it, {self.reader} pairs: python -m data.prepare {self.corpus}"
            raise ValueError(f"{self.folder} holds {self.meta['name']!r}, not translation pairs; {hint}")

    def _index_of(self, split: str) -> np.ndarray:
        path, pairs = self.folder / f"{split}.idx", self.meta["splits"][split]["pairs"]
        expected = 8 * (2 * pairs + 1)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {again(self.meta)}")
        if path.stat().st_size != expected:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes instead of {expected:,}; {again(self.meta)}")
        index = np.memmap(path, dtype=np.int64, mode="r")
        if index[-1] != len(self.tokens[split]):
            raise ValueError(f"{path} does not fit {split}.bin; {again(self.meta)}")
        return index

    def batch(self, split: str, step: int, micro: int = 0) -> Masked:
        """The rows and masks of one micro-batch, for training."""
        number = step * self.micros_per_step + micro
        languages, pairs, sizes = self._micro(split, number)
        ids, length = self._rows(split, pairs, sizes)
        second = np.arange(ids.shape[1]) > sizes[:, :1]  # (B, T)
        rng = np.random.default_rng((PAIR_MASKS, self.seed, self._index(split), step, micro))
        hidden, one = self._mask(ids, rng, ~second)
        hidden, two = self._mask(hidden, rng, second)
        return pack(ids, hidden, np.sort(np.concatenate([one, two])), length, languages)

    def eval_tokens(self, split: str, max_tokens: int | None = None, halves: tuple[int, ...] = (0, 1)) -> int:
        """How many tokens `eval_batches` reads in one masking, `<s>` and `</s>` included, padding not."""
        _, _, sizes = self._eval_pairs(split, max_tokens)
        return int((1 + sizes[:, halves].sum(axis=1)).sum())

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
        """Every pair, longest first, masked in `maskings` ways, batches dealt round-robin to processes.

        Yields (k, first, batch) as MaskedData.eval_batches does. max_tokens takes about that many tokens: the first of
        every language's pairs, then the second of each, and so on. With `only` 0 or 1 that half alone is masked, as
        otherwise; without context the rows are then `<s> half </s>`, row for row the same texts under the same masks,
        so that the two losses tell what the translation helps.
        """
        if not context and only is None:
            raise ValueError("without context only one half is there: context=False goes with only=0 or only=1")
        masked = (0, 1) if only is None else (only,)
        shown = (0, 1) if context else masked
        languages, pairs, sizes = self._eval_pairs(split, max_tokens)
        lengths = 1 + sizes.sum(axis=1)
        cuts = self._cuts(lengths)
        lengths = 1 + sizes[:, shown].sum(axis=1)
        firsts = np.concatenate([[0], lengths.cumsum()]).tolist()
        for turn in range(rank, maskings * (len(cuts) - 1), world):
            k, number = divmod(turn, len(cuts) - 1)
            rows = slice(cuts[number], cuts[number + 1])
            ids, length = self._rows(split, pairs[rows], sizes[rows], shown)
            hidden, positions = ids.copy(), []
            for row, (pair, parts) in enumerate(zip(pairs[rows].tolist(), sizes[rows].tolist())):
                for half in masked:
                    # one half at a time: its masks must depend on nothing else
                    begin, size = 1 + (parts[0] if half and context else 0), parts[half]
                    rng = np.random.default_rng((PAIR_EVALUATION, k, pair, half))
                    part = hidden[row : row + 1, begin : begin + size]
                    part[:], chosen = self._mask(part, rng)
                    positions.append(row * ids.shape[1] + begin + chosen)
            yield k, firsts[rows.start], pack(ids, hidden, np.concatenate(positions), length, languages[rows])

    def raw(self, split: str, language: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """First and second text of every pair of that language pair, ids without special tokens, in order."""
        if language not in self.languages:
            nearest = difflib.get_close_matches(language, self.languages, n=1, cutoff=0)[0]
            raise ValueError(f"no pair {language!r} among {len(self.languages)}; did you mean {nearest!r}?")
        first, pairs = self.streams[split][self.languages.index(language)].tolist()
        for pair in range(first, first + pairs):
            begin, middle, end = self.index[split][2 * pair : 2 * pair + 3]
            tokens = self.tokens[split][begin:end].astype(np.int64)
            yield tokens[: middle - begin - 1], tokens[middle - begin : -1]

    def _micro(self, split: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Languages and pairs, (B,), and sizes of their halves, (B, 2), of that micro-batch of the sequence."""
        before = self._micros[split]
        while before[-1] <= number:
            before.append(before[-1] + len(self._sorted(split, len(before) - 1)[0]))
        turn = bisect_right(before, number) - 1
        micros, languages, pairs = self._sorted(split, turn)
        begin, end = micros[number - before[turn]]
        return languages[begin:end], pairs[begin:end], self._sizes(split, pairs[begin:end])

    def _sorted(self, split: str, turn: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next `rounds` rounds: (micros, 2) begin and end of micro-batches in languages and pairs, by length."""
        if (split, turn) not in self._rounds:
            rounds = [self._round(split, number) for number in range(turn * self.rounds, (turn + 1) * self.rounds)]
            languages, draws = map(np.concatenate, zip(*rounds))
            pairs = np.empty_like(draws)
            for language in np.unique(languages):
                own = languages == language  # their draws are in order and none is missing
                pairs[own] = self._drawn_pairs(split, int(language), int(draws[own][0]), int(own.sum()))
            order, cuts = self._arranged(self._sizes(split, pairs))
            cuts = np.array(cuts)
            rng = np.random.default_rng((PAIR_CUTS, self.seed, self._index(split), turn))
            micros = rng.permutation(np.stack([cuts[:-1], cuts[1:]], axis=1))
            # the micro-batches of a step may end one and begin the next: keep two
            self._rounds = dict(list(self._rounds.items())[-1:])
            self._rounds[split, turn] = micros, languages[order], pairs[order]
        return self._rounds[split, turn]

    def _arranged(self, sizes: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The order of pairs with halves of these sizes, (B, 2), and where it is cut into micro-batches."""
        lengths = 1 + sizes.sum(axis=1)
        order = (-lengths).argsort(kind="stable")
        return order, self._cuts(lengths[order])

    def _drawn_pairs(self, split: str, language: int, draw: int, count: int) -> np.ndarray:
        """The pairs of `count` draws of a language from that one on: each pass is all of its pairs, shuffled."""
        first, size = self.streams[split][language].tolist()
        kept = self.kept.get((split, language))
        size, found = size if kept is None else len(kept), []
        while count:
            number, place = divmod(draw, size)
            known, order = self._passes.get((split, language), (None, None))
            if known != number:
                rng = np.random.default_rng((PAIR_ORDER, self.seed, self._index(split), language, number))
                order = rng.permutation(size).astype(np.uint32)
                self._passes[split, language] = number, order
            numbers = order[place : place + count].astype(np.int64)
            found.append(first + (numbers if kept is None else kept[numbers].astype(np.int64)))
            draw, count = draw + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)

    def _cuts(self, lengths: np.ndarray) -> list[int]:
        """Where rows of these lengths, longest first, are cut into batches of micro_tokens, 0 and the end included."""
        cuts = [0]
        while cuts[-1] < len(lengths):
            cuts.append(min(len(lengths), cuts[-1] + self.micro_tokens // int(lengths[cuts[-1]])))
        return cuts

    def _sizes(self, split: str, pairs: np.ndarray) -> np.ndarray:
        """(B, 2) tokens of both halves, each with its </s>: the longer is cut first, until a row is a block."""
        begin, middle, end = (self.index[split][2 * pairs + i] for i in range(3))
        one, two, room = middle - begin, end - middle, self.block_size - 1
        one = np.minimum(one, np.maximum(room - two, room - room // 2))
        return np.stack([one, np.minimum(two, room - one)], axis=1)

    def _eval_pairs(self, split: str, max_tokens: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Languages and pairs, (B,), and sizes of their halves, (B, 2), longest pair first."""
        places = [self.kept.get((split, j), np.arange(count)) for j, (_, count) in enumerate(self.streams[split])]
        languages = np.repeat(np.arange(len(places)), [len(own) for own in places])
        places = np.concatenate(places).astype(np.int64)
        pairs = self.streams[split][languages, 0] + places
        if max_tokens is not None:
            chosen = places.argsort(kind="stable")
            tokens = 1 + self._sizes(split, pairs[chosen]).sum(axis=1)
            chosen = chosen[: max(1, int((tokens.cumsum() <= max_tokens).sum()))]
            languages, pairs = languages[chosen], pairs[chosen]
        sizes = self._sizes(split, pairs)
        order = np.lexsort((pairs, -sizes.sum(axis=1)))
        return languages[order], pairs[order], sizes[order]

    def _rows(
        self, split: str, pairs: np.ndarray, sizes: np.ndarray, halves: tuple[int, ...] = (0, 1)
    ) -> tuple[np.ndarray, np.ndarray]:
        """ids (B, T) of the rows, T the longest's, and lengths (B,), of both halves or of one."""
        length = 1 + sizes[:, halves].sum(axis=1)
        ids = np.full((len(pairs), int(length.max())), self.tokenizer.pad)
        ids[:, 0] = self.tokenizer.bos
        for row, (pair, parts) in enumerate(zip(pairs.tolist(), sizes.tolist())):
            place = 1
            for half in halves:
                start = self.index[split][2 * pair + half]
                ids[row, place : place + parts[half]] = self.tokens[split][start : start + parts[half]]
                place += parts[half]
                ids[row, place - 1] = self.tokenizer.eos  # where the text was cut
        return ids, length
