"""A folder that `python -m data.prepare` wrote: checked, and its tokens mapped into memory."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.files import PREPARED, SPLITS, checksum, say, sha256, source_files
from data.tokenizers import KINDS, Tokenizer, load_tokenizer

HASHED_UP_TO = 1 << 30  # bytes; hashing a larger file takes seconds at every start, so only its size is compared
AGAIN = "remove the folder and prepare it again: python -m data.prepare --help says how"


def ready(name: str, kind=None, make=True) -> Path:
    """data/prepared/NAME, or the prepared folder called `name`.

    Where `make` says so a corpus that packages contain is prepared now, and so are the user's texts, of a kind as in
    data.corpora, under a vocabulary of their own. Of each state of their files, by size and time, a folder is kept.
    """
    folder, source, options = PREPARED / name, Path(name).resolve(), {}
    for place in (folder, Path(name)):
        if (place / "meta.json").exists() or (place / "train.bin").exists():
            return place
    from data.prepare import CORPORA, prepare  # not above: what is prepared is read without the readers of all corpora

    if name not in CORPORA and source.exists():
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in source_files(source)]
        state = hashlib.sha256(repr((kind, files)).encode()).hexdigest()
        folder, options = PREPARED / f"{source.stem[:40]}-{state[:8]}", {"source": source}
        name = {"languages": "cc100", "pairs": "bitext"}.get(kind, "text")
    elif name not in CORPORA or not CORPORA[name].packages:
        return folder
    if make and not folder.exists():
        say(f"preparing {name}, once: {folder} will have it")
        with suppress(FileExistsError):  # another process may be faster
            prepare(name, out=folder, **options)
    return folder


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared folder. FileNotFoundError or ValueError names the file that is missing or has changed."""
    path = folder / "meta.json"
    if not path.is_file():
        how = f"python -m data.prepare {folder.name} prepares it, if it is a corpus of data/README.md"
        raise FileNotFoundError(f"no prepared data in {folder}, nor is there such a text: {how}")
    try:
        meta = json.loads(path.read_text())
        intact = meta["checksum"] == checksum(meta)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(f"{path} has changed since it was written; {AGAIN}")
    for name, expected in meta["files"].items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; {AGAIN}")
        if file.stat().st_size <= HASHED_UP_TO and sha256(file) != expected:
            raise ValueError(f"{file} has changed since it was written; {AGAIN}")
    return meta


def map_numbers(file: Path, dtype: str, count: int) -> ndarray:
    """The numbers in a file, which stay on the disk until they are used."""
    size, expected = file.stat().st_size, count * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"{file} has {size:,} bytes instead of {expected:,}; {AGAIN}")
    return np.memmap(file, dtype, mode="r").view(ndarray)


class Spans(NamedTuple):
    """R rows of P texts each, as places in the tokens of a split. A window has one text, a pair has two."""

    language: ndarray  # (R,) index into the data's `languages`
    starts: ndarray  # (R, P) where each text begins
    sizes: ndarray  # (R, P) how many tokens it has

    @property
    def lengths(self) -> ndarray:
        """(R,) the tokens of each row: `<s>` and its texts."""
        return 1 + self.sizes.sum(axis=1)

    def take(self, which: ndarray | slice) -> "Spans":
        return Spans(*(array[which] for array in self))


@dataclass(eq=False)
class Prepared:
    """A folder that `python -m data.prepare` wrote. FileNotFoundError or ValueError: missing, damaged, another kind."""

    folder: Path
    block_size: int  # T, the tokens of the longest row
    micro_tokens: int  # the most tokens of a micro-batch, padding included
    micros_per_step: int = 1
    seed: int = 0

    kind = None  # of the corpora that the class reads, see data.corpora; None: any

    @classmethod
    def open(cls, name: str, config, context, **options) -> "Prepared":
        """The corpus `name`, or the prepared folder `name`, read as a script's config says; see `ready`."""
        folder = ready(name, cls.kind, make=context.rank == 0)
        context.barrier()
        sizes = config.block_size, config.micro_tokens, config.batch_tokens // config.micro_tokens
        return cls(folder, *sizes, config.seed, **options)

    def __post_init__(self):
        self.batch_size, rest = divmod(self.micro_tokens, self.block_size)  # B, where all rows are equally long
        if self.batch_size == 0 or (rest and self.kind != "pairs"):
            raise ValueError(f"micro_tokens {self.micro_tokens} must hold rows of block_size {self.block_size} tokens")
        self.meta = meta = read_meta(self.folder)
        if self.kind not in (None, meta["kind"]):
            found = f"{self.folder} holds {meta['name']!r}, a corpus of {meta['kind']}"
            raise ValueError(f"{found}; {type(self).__name__} reads {self.kind}: data/README.md lists them")
        self.checksum = meta["checksum"]
        self.vocab_size = meta["tokenizer"]["vocab_size"]
        self.languages = sorted(meta.get("languages", []))  # J languages, or pairs of them
        self.tokens = {}  # split -> (N,)
        self.index = {}  # split -> (2 * pairs + 1,): where each text of a pair begins, and the end
        self.streams = {}  # split -> (J, 2): the number of each language's first token (or pair), and its count
        unit = "pairs" if meta["kind"] == "pairs" else "tokens"
        for split, total in meta["splits"].items():
            file = self.folder / f"{split}.bin"
            self.tokens[split] = map_numbers(file, meta["dtype"], total["tokens"])
            if unit == "pairs":
                self.index[split] = map_numbers(file.with_suffix(".idx"), "int64", 2 * total["pairs"] + 1)
            counts = [meta["languages"][language][split] for language in self.languages]
            self.streams[split] = np.array([[own["first"], own[unit]] for own in counts], dtype=np.int64)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        kind = KINDS[self.meta["tokenizer"]["kind"]]
        return load_tokenizer(self.folder / kind.filename)

    def random(self, purpose, split, *key) -> np.random.Generator:
        """The generator of one batch."""
        return np.random.default_rng((purpose, self.seed, SPLITS.index(split), *key))

    def log_frequencies(self) -> Tensor:
        """(V,) the log of each token's share of the training text, counted in at most 16 million of its tokens."""
        tokens = self.tokens["train"]
        every = 1 + len(tokens) // 2**24
        counts = np.bincount(tokens[::every], minlength=self.vocab_size) + 1
        shares = counts / counts.sum()
        return torch.from_numpy(np.log(shares)).float()

    def stream(self, split, language: str) -> tuple[int, int]:
        """The number of the first token (or pair) of a language, and how many it has."""
        return tuple(self.streams[split][self.languages.index(language)].tolist())

    def pairs(self, split, numbers: ndarray) -> Spans:
        """The pairs of a split that have these numbers (R,). The size of each text includes its `</s>`."""
        first = self.streams[split][:, 0]
        language = first.searchsorted(numbers, side="right") - 1
        texts = 2 * numbers[:, None] + np.array([0, 1])  # (R, 2)
        starts = self.index[split][texts]
        ends = self.index[split][texts + 1]
        return Spans(language, starts, ends - starts)

    def texts(self, split, language: str) -> tuple[list, list]:
        """The first and the second texts of a language pair in "valid" or "test", as they were written."""
        first, count = self.stream(split, language)
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            pairs = list(map(json.loads, islice(file, first, first + count)))
        return [one for one, _ in pairs], [two for _, two in pairs]
