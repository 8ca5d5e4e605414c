"""Readers of text files: documents and translation pairs, plain, .gz or .xz.

A file that cannot be read raises a one-line ValueError or OSError with its name and, if known, the line number.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, groupby, islice, product, zip_longest
from pathlib import Path

from tqdm import tqdm

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {name: name for name in SPLITS} | {"val": "valid", "validation": "valid", "dev": "valid"}
HEAD = 1000  # the number of lines at the start of a text file that decide what its documents are
LONGEST_BLOCK = 100_000  # lines in a document; a longer block is split
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}
JSON = (".json", ".jsonl", ".ndjson")
# Files that are not text, skipped in a folder; then unsupported formats that may contain text.
NO_TEXT = re.compile(
    r"^(readme|licen[cs]e|notice|dataset_infos?)\b|\.(png|jpe?g|gif|webp|svg|ico|mp[34]|wav|flac|avi|so|dll|exe|pyc"
    r"|np[yz]|bin|pth?|safetensors|ckpt|pkl|h5|db|sqlite|lock|idx)$"
)
UNREAD = re.compile(r"\.(csv|zst|bz2|zip|tar|tgz|7z|rar|pdf|docx?|epub|arrow|feather|avro|orc|tfrecord)$")
Records = Iterable[tuple[str, ...]]  # (split, text) or (split, first text, second text)


def split_of(key: str, valid: float, test: float) -> str:
    """The split chosen by a hash of `key`, given the shares of valid and test. Equal keys share a split."""
    share = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big") / 2**64
    if share < valid:
        return "valid"
    return "test" if share < valid + test else "train"


def named_split(path: Path) -> str | None:
    """The split in a relative path such as valid-00001.jsonl, shard.test.txt.gz or train/a.txt."""
    words = re.split(r"[._/-]", path.as_posix().lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def source_files(source: Path) -> list[Path]:
    """The file itself, or all files under a folder, sorted. Follows links, skips hidden files, lists each file once."""
    if source.is_file():
        return [source]
    paths = {}  # real path of a folder or file -> the path it was first found at

    def report(error: OSError):
        if isinstance(error, PermissionError):
            say_skipped(source, "permission denied", error.filename)

    for folder, subfolders, names in os.walk(source, followlinks=True, onerror=report):
        if paths.setdefault(os.path.realpath(folder), folder) != folder:  # already seen through another link
            subfolders.clear()
            continue
        subfolders[:] = [name for name in sorted(subfolders) if not name.startswith(".")]
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_file():  # not a pipe or a broken link
                paths.setdefault(os.path.realpath(path), path)
    return sorted(path for path in paths.values() if isinstance(path, Path))


def text_files(source: Path, *endings: str) -> list[Path]:
    """The `source_files` with one of the endings that may contain documents. Reports the files skipped."""
    paths, skipped = [], []
    for path in source_files(source):
        name = uncompressed_name(path).lower()
        if path == source or (name.endswith(endings or "") and not NO_TEXT.search(name)):
            paths.append(path)
        else:
            skipped.append(path.name)
    say_skipped(source, "their names do not look like training text; pass a file alone to read it", *skipped)
    return paths


def say_skipped(source: Path, reason: str, *names: str):
    if names:
        say(f"skipped {len(names):,} file(s) in {source} ({', '.join(names[:3])}): {reason}")


def one_of(folder: Path, *names: str) -> Path:
    """The first of these files that exists in the folder, plain or compressed."""
    for name, suffix in product(names, ("", ".gz", ".xz")):
        path = folder / f"{name}{suffix}"
        if path.is_file():
            return path
    raise FileNotFoundError(f"no {' or '.join(names)} (plain, .gz or .xz) in {folder}")


def uncompressed_name(path: Path) -> str:
    return re.sub(r"\.(gz|xz)$", "", path.name, flags=re.IGNORECASE)


# ---------------------------------------------------------------------------------------------------------------------
# Lines and documents


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without its byte order mark. Each ends in a line feed, even if it ended in CR LF."""
    open_file = COMPRESSED.get(path.suffix.lower(), open)
    try:
        opened = os.dup(0) if str(path) == "-" else path  # standard input
        with open_file(opened, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if 3 * line.count("\0") > len(line):
                    raise ValueError(f"{path} is not UTF-8: line {number:,} has many zero bytes, as in UTF-16")
                yield line.removesuffix("\n").removesuffix("\r") + "\n"
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_documents(path: Path, blocks: bool = False, source: Path | None = None) -> Iterator[str]:
    """The documents of a file: the rows of Parquet or JSON lines, the blocks or lines of plain text.

    The file name determines the format. In plain text, blocks between blank lines are documents if the blank lines are
    regular or `blocks` is true; otherwise lines are: a message says which, of `source` (default: the file's folder).
    """
    name = uncompressed_name(path).lower()
    if UNREAD.search(name):
        raise ValueError(f"{path}: unsupported format; pass plain text, JSON lines or Parquet (plain, .gz or .xz)")
    if name.endswith(".parquet"):
        yield from read_parquet(path)
        return
    lines = read_lines(path)
    head = list(islice(lines, HEAD))
    lines = chain(head, lines)
    if name.endswith(JSON):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    text = json.loads(line)["text"]
                except (ValueError, TypeError, KeyError, RecursionError):  # the last one: nested too deeply
                    text = None
                if not isinstance(text, str):
                    raise ValueError(f"{path}, line {number}: not a JSON object with a string 'text'")
                yield text
    elif blocks or are_blocks(head):
        say(f"{source or path.parent}: every block between blank lines is a document")
        for is_blank, block in groupby(lines, key=str.isspace):
            while not is_blank and (part := list(islice(block, LONGEST_BLOCK))):
                yield "".join(part).strip()
    else:
        say(f"{source or path.parent}: every line is a document")
        yield from filter(None, map(str.strip, lines))


def progress(rows: Iterable, label: str, **options) -> Iterator:
    """The rows, with a progress bar on rank 0's terminal; without one, a line after 5, 15, 35, 55 ... seconds."""
    silent = int(os.environ.get("RANK", 0)) > 0
    bar = tqdm(rows, label, leave=False, delay=1, disable=silent or None, **options)
    pause, last = 5, time.monotonic()
    for number, row in enumerate(bar, start=1):
        yield row
        if bar.disable and not silent and time.monotonic() > last + pause:
            pause, last = min(2 * pause, 20), time.monotonic()
            print(f"{label}: {number:,} {f'of {bar.total:,}' if bar.total else 'so far'}", file=sys.stderr)


@cache
def say(line: str):
    """Prints each distinct line once, not for every file of a folder."""
    print(line, file=sys.stderr)


def are_blocks(head: list[str]) -> bool:
    """Whether blank lines are regular: two or more blocks, and at least half of the lines in blocks of up to 100."""
    sizes = [block.count("\n") for block in re.split(r"\n(?:[^\S\n]*\n)+", "".join(head).strip() + "\n")]
    return len(sizes) > 1 and 2 * sum(size for size in sizes if size <= 100) >= sum(sizes)


def read_parquet(path: Path) -> Iterator[str]:
    """The column "text"; a missing value is an empty text."""
    from pyarrow import ArrowException, parquet  # optional dependency

    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64, columns=["text"]):
            yield from (text or "" for text in batch["text"].cast("large_string").to_pylist())
    except (ArrowException, KeyError, OSError, UnicodeDecodeError) as error:  # a damaged file raises any of these
        raise ValueError(f"{path} cannot be read: {error}".splitlines()[0]) from error


def has_words(text: str) -> bool:
    """Whether spaces separate words, not phrases as in Thai. Even Greenlandic words average only 15 letters."""
    words = text.split()
    return sum(map(len, words)) < 16 * len(words)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


def read_pairs(*paths: Path) -> Iterator[tuple[str, str]]:
    """The stripped lines of two aligned files or of one .tsv. Raises ValueError if a line is not two texts."""
    if len(paths) == 1:
        rows = (line.split("\t") for line in read_lines(paths[0]))
    else:
        rows = zip_longest(*map(read_lines, paths), fillvalue="")
    for number, row in enumerate(rows, start=1):
        texts = tuple(text.strip() for text in row)
        if len(texts) != 2 or not all(texts):
            names = " and ".join(path.name for path in paths)
            raise ValueError(f"{names} in {paths[0].parent}, line {number}: expected two texts")
        yield texts


def read_sides(folder: Path, sides: tuple[str, str], *names: str) -> Iterator[tuple[str, str]]:
    """Pairs from NAME.de and NAME.en if `sides` is ("de", "en"), for the first of the names that exists."""
    return read_pairs(*[one_of(folder, *(f"{name}.{side}" for name in names)) for side in sides])


# ---------------------------------------------------------------------------------------------------------------------
# Prepared folders: data/prepare.py writes them, and data/folder.py reads them

PREPARED = Path(__file__).parent / "prepared"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(meta: dict) -> str:
    """A hash of the data: of every file, every count and the tokenizer, but not of their origin."""
    data = {key: meta[key] for key in meta.keys() - {"name", "source", "versions", "checksum"}}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
