"""Opens a folder written by `python -m data.prepare`: checks it and maps its tokens into memory."""

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
from data.tokenizers import Tokenizer, load_tokenizer

HASHED_UP_TO = 1 << 30  # bytes; larger files take seconds to hash, so only their size is checked
AGAIN = "remove the folder and prepare it again: python -m data.prepare --help shows how"


def ready(name: str, kind=None, make=True, run: str | None = None, out_dir="") -> Path:
    """data/prepared/NAME, or the prepared folder at path `name`.

    With `make`, prepares a corpus of installed packages or the user's texts at path `name`. Texts become a corpus of
    this kind (see data.corpora), in a new folder whenever the size or time of a file changes, with the tokenizer in the
    folder `run` or one learned from them. If texts have been moved, the tokens that a run in `out_dir` was trained on.
    """
    folder, source, options = PREPARED / name, Path(name).resolve(), {}
    for path in (folder, Path(name)):
        if (path / "meta.json").exists() or (path / "train.bin").exists():
            return path
    from data.prepare import CORPORA, prepare  # only here: a prepared folder does not need these modules

    installed = name in CORPORA and CORPORA[name].packages
    if not installed and source.exists():
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in source_files(source)]
        state, options = [kind, files], {"source": source}
        with suppress(FileNotFoundError):  # a folder of Hugging Face's has no tokenizer of ours
            if run:
                state.append(load_tokenizer(run).sha256)
                options["tokenizer"] = Path(run)
        digits = hashlib.sha256(repr(tuple(state)).encode()).hexdigest()[:8]
        folder = PREPARED / f"{source.stem[:40]}-{digits}"
        name = {"languages": "cc100", "pairs": "bitext"}.get(kind, "text")
    elif not installed:
        runs = "".join(file.read_text() for file in Path(out_dir).glob("*/config.json"))
        for meta in PREPARED.glob(f"{source.stem[:40]}-*/meta.json"):
            if json.loads(meta.read_text())["checksum"] in runs:
                say(f"{name} does not exist: using its tokens in {meta.parent}")
                return meta.parent
        return folder
    if make and not folder.exists():
        say(f"preparing {name} once, in {folder}")
        with suppress(FileExistsError):  # another process may finish first
            prepare(name, out=folder, **options)
    return folder


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared folder. Raises FileNotFoundError or ValueError if a file is missing or has changed."""
    path = folder / "meta.json"
    if not path.is_file():
        hint = f"if data/README.md lists it, python -m data.prepare {folder.name}, else pass a text file or folder"
        raise FileNotFoundError(f"there is no {folder.name}: {hint}")
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
    """Memory-maps the numbers in a file. Raises ValueError if there are not `count`."""
    size, expected = file.stat().st_size, count * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"{file} has {size:,} bytes instead of {expected:,}; {AGAIN}")
    return np.memmap(file, dtype, mode="r").view(ndarray)


class Spans(NamedTuple):
    """R rows of P texts each, as spans of a split's tokens. A window has one text, a pair has two."""

    language: ndarray  # (R,) index into the data's `languages`
    starts: ndarray  # (R, P) first token of each text
    sizes: ndarray  # (R, P) number of tokens

    @property
    def lengths(self) -> ndarray:
        """(R,) number of tokens in each row: `<s>` and its texts."""
        return 1 + self.sizes.sum(axis=1)

    def take(self, rows: ndarray | slice) -> "Spans":
        return Spans(*(array[rows] for array in self))


@dataclass(eq=False)
class Prepared:
    """A prepared folder. Raises FileNotFoundError or ValueError if it is missing, damaged or of another kind."""

    folder: Path
    block_size: int  # T, the maximum number of tokens in a row
    micro_tokens: int  # the maximum number of tokens in a micro-batch, padding included
    micros_per_step: int = 1
    seed: int = 0

    kind = None  # the kind of corpus that the class reads, see data.corpora; None: any

    @classmethod
    def open(cls, name: str, config, context, **options) -> "Prepared":
        """Opens the corpus or prepared folder `name` (see `ready`) with the sizes in a script's config."""
        where = getattr(config, "init_from", None), getattr(config, "out_dir", "")
        folder = ready(name, cls.kind, context.rank == 0, *where)
        context.barrier()
        sizes = config.block_size, config.micro_tokens, config.batch_tokens // config.micro_tokens
        return cls(folder, *sizes, config.seed, **options)

    def __post_init__(self):
        self.batch_size, rest = divmod(self.micro_tokens, self.block_size)  # B, if all rows have T tokens
        if self.batch_size == 0 or (rest and self.kind != "pairs"):
            bound = "at least" if self.kind == "pairs" else "a multiple of"
            raise ValueError(f"micro_tokens = {self.micro_tokens} must be {bound} block_size = {self.block_size}")
        self.meta = meta = read_meta(self.folder)
        if self.kind not in (None, meta["kind"]):
            corpus = f"{self.folder} contains {meta['name']!r}, a corpus of {meta['kind']}"
            raise ValueError(f"{corpus}; {type(self).__name__} reads {self.kind}: see data/README.md")
        self.checksum = meta["checksum"]
        self.vocab_size = meta["tokenizer"]["vocab_size"]
        self.languages = sorted(meta.get("languages", []))  # J languages or language pairs
        self.tokens = {}  # split -> (N,)
        self.index = {}  # split -> (2 * pairs + 1,): the position of each text's first token, and the end
        self.streams = {}  # split -> (J, 2): the index of each language's first token (or pair), and their count
        unit = "pairs" if meta["kind"] == "pairs" else "tokens"
        for split, total in meta["splits"].items():
            file = self.folder / f"{split}.bin"
            self.tokens[split] = map_numbers(file, meta["dtype"], total["tokens"])
            if unit == "pairs":
                self.index[split] = map_numbers(file.with_suffix(".idx"), "int64", 2 * total["pairs"] + 1)
            counts = [meta["languages"][language][split] for language in self.languages]
            self.streams[split] = np.array([[count["first"], count[unit]] for count in counts], dtype=np.int64)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def random(self, purpose, split, *key) -> np.random.Generator:
        return np.random.default_rng((purpose, self.seed, SPLITS.index(split), *key))

    def log_frequencies(self) -> Tensor:
        """(V,) log share of each token in the training text, estimated from at most 16 million tokens."""
        tokens = self.tokens["train"]
        counts = np.bincount(tokens[:: 1 + len(tokens) // 2**24], minlength=self.vocab_size) + 1
        return torch.from_numpy(np.log(counts / counts.sum())).float()

    def stream(self, split, language: str) -> tuple[int, int]:
        """The index of a language's first token (or pair), and their count."""
        return tuple(self.streams[split][self.languages.index(language)].tolist())

    def pairs(self, split, numbers: ndarray) -> Spans:
        """The pairs of a split with these numbers (R,). The size of each text includes its `</s>`."""
        language = self.streams[split][:, 0].searchsorted(numbers, side="right") - 1
        texts = 2 * numbers[:, None] + np.array([0, 1])  # (R, 2)
        starts = self.index[split][texts]
        return Spans(language, starts, self.index[split][texts + 1] - starts)

    def texts(self, split, language: str) -> tuple[list, list]:
        """The original first and second texts of a language pair in "valid" or "test"."""
        first, count = self.stream(split, language)
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            pairs = list(map(json.loads, islice(file, first, first + count)))
        return [one for one, _ in pairs], [two for _, two in pairs]
