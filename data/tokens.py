"""Batches from a prepared corpus, as a pure function of (seed, step, micro).

Micro-batch m of step s holds samples (s * micros_per_step + m) * B ... + B - 1 of one endless sequence that passes over
the split epoch by epoch. Whoever asks for a micro-batch gets the same one, so a resumed run and any number of processes
see the data of one uninterrupted process.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from data.tokenizers import Tokenizer, load_tokenizer


class Prepared:
    """A folder written by `python -m data.prepare`, its tokens memory-mapped; B = micro_tokens // T rows a batch.

    Raises FileNotFoundError or ValueError, in one line, when the folder is missing or damaged.
    """

    def __init__(self, folder: Path | str, block_size: int, micro_tokens: int, micros_per_step: int, seed: int):
        if micro_tokens < block_size:
            raise ValueError(f"micro_tokens {micro_tokens} must be at least one block of {block_size} tokens")
        self.folder, self.seed = Path(folder), seed
        self.block_size, self.batch_size, self.micros_per_step = block_size, micro_tokens // block_size, micros_per_step
        self.meta = read_meta(self.folder)
        self.checksum: str = self.meta["checksum"]
        self.vocab_size: int = self.meta["tokenizer"]["vocab_size"]
        self.tokens = {split: self._map(split) for split in self.meta["splits"]}  # split -> (N,)

    def _map(self, split: str) -> np.ndarray:
        path, dtype = self.folder / f"{split}.bin", np.dtype(self.meta["dtype"])
        expected = self.meta["splits"][split]["tokens"] * dtype.itemsize
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {again(self.meta)}")
        if path.stat().st_size != expected:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes instead of {expected:,}; {again(self.meta)}")
        if not expected:
            what = "pairs" if self.meta.get("kind") == "pairs" else "text"
            raise ValueError(f"{path} holds no {what}; {again(self.meta)}")
        return np.memmap(path, dtype=dtype, mode="r")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. ValueError if its file has changed since."""
        tokenizer = load_tokenizer(self.folder)
        if tokenizer.sha256 != self.meta["tokenizer"]["sha256"]:
            raise ValueError(f"the tokenizer in {self.folder} is not the one that made its tokens; {again(self.meta)}")
        return tokenizer

    def verify(self, largest: int = 1 << 34):
        """Read .bin, .idx and .jsonl files through and compare their SHA-256; ValueError names the first that differs.

        Files over `largest` bytes are left alone: they take minutes, while other processes wait. Their size is right.
        """
        for split, counts in self.meta["splits"].items():
            for suffix, key in (("bin", "sha256"), ("idx", "index_sha256"), ("jsonl", "texts_sha256")):
                path = self.folder / f"{split}.{suffix}"
                if key not in counts:
                    continue
                if not path.is_file():
                    raise FileNotFoundError(f"{path} is missing; {again(self.meta)}")
                if path.stat().st_size > largest:
                    continue
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != counts[key]:
                        raise ValueError(f"{path} has changed since it was written; {again(self.meta)}")


class TokenData(Prepared):
    """Windows of T = block_size tokens. ValueError when a split is too short for one."""

    def __init__(self, folder: Path | str, block_size: int, micro_tokens: int, micros_per_step: int = 1, seed: int = 0):
        super().__init__(folder, block_size, micro_tokens, micros_per_step, seed)
        for split, tokens in self.tokens.items():
            if len(tokens) <= block_size:
                needed = f"block_size {block_size} needs {block_size + 1:,}"
                raise ValueError(f"{self.folder / f'{split}.bin'} has {len(tokens):,} tokens and {needed}")
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    def batch(self, split: str, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs x and targets y, both (B, T) int64 and y one token ahead; no window comes twice in an epoch."""
        first = (step * self.micros_per_step + micro) * self.batch_size
        starts = [self._start(split, index) for index in range(first, first + self.batch_size)]
        return self._windows(split, starts)

    def eval_batches(
        self, split: str, max_tokens: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The split (or about its first max_tokens) in order, in disjoint windows dealt round-robin to processes.

        Yields x and y, both (rows, T) with rows = B but perhaps in the last. Up to T tokens at the end are unused.
        """
        windows = (len(self.tokens[split]) - 1) // self.block_size
        if max_tokens is not None:
            windows = min(windows, max(1, max_tokens // self.block_size))
        for first in range(rank * self.batch_size, windows, world * self.batch_size):
            last = min(first + self.batch_size, windows)
            yield self._windows(split, [index * self.block_size for index in range(first, last)])

    def _start(self, split: str, index: int) -> int:
        """Where sample `index` begins: its place in its epoch's shuffled windows, shifted by the epoch's offset."""
        size, T = len(self.tokens[split]), self.block_size
        windows = max(1, size // T - 1)  # one fewer than fit, so that every offset leaves the same number
        epoch, place = divmod(index, windows)
        if (split, epoch) not in self._orders:
            rng = np.random.default_rng((self.seed, epoch))
            offset = rng.integers(min(T, size - windows * T))
            # a micro-batch may end one epoch and begin the next: keep two
            self._orders = dict(list(self._orders.items())[-1:])
            self._orders[split, epoch] = offset + T * rng.permutation(windows)
        return int(self._orders[split, epoch][place])

    def _windows(self, split: str, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tokens[split][start : start + self.block_size + 1] for start in starts]
        window = torch.from_numpy(np.stack(rows).astype(np.int64))  # (rows, T + 1)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared folder; FileNotFoundError or ValueError when it is missing or damaged."""
    path = folder / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"no prepared data in {folder}; {make(folder.name)}")
    try:
        meta = json.loads(path.read_text())
        meta["splits"], meta["dtype"], meta["tokenizer"]["vocab_size"], meta["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; {make(folder.name, again=True)}") from error
    return meta


def again(meta: dict) -> str:
    return make(meta["name"], again=True)


def make(name: str, again: bool = False) -> str:
    return f"prepare it{' again' if again else ''}: python -m data.prepare {name} (--help says how)"
