"""Readers of the files that texts come in: documents and translation pairs, plain, .gz or .xz.

What cannot be read is a ValueError or an OSError of one line, which names the file and, where it is known, the line.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {name: name for name in SPLITS} | {"val": "valid", "validation": "valid", "dev": "valid"}
HEAD = 1000  # lines at the beginning of a text file that decide what its documents are
LONGEST_BLOCK = 100_000  # lines: a longer one is several documents
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}
JSON = (".json", ".jsonl", ".ndjson")
# What a folder of text may hold besides, and is passed over; and files of text in a form that is not read.
NO_TEXT = re.compile(
    r"^(readme|licen[cs]e|notice|dataset_infos?)\b|\.(png|jpe?g|gif|webp|svg|ico|mp[34]|wav|flac|avi|so|dll|exe|pyc"
    r"|np[yz]|bin|pth?|safetensors|ckpt|pkl|h5|db|sqlite|lock|idx)$"
)
UNREAD = re.compile(r"\.(csv|zst|bz2|zip|tar|tgz|7z|rar|pdf|docx?|epub|arrow|feather|avro|orc|tfrecord)$")
Records = Iterable[tuple[str, ...]]  # (split, text) or (split, first text, second text)


def split_of(key: str, valid: float, test: float) -> str:
    """The split that a hash of `key` chooses, given the shares of valid and test. Equal keys share a split."""
    digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < valid:
        return "valid"
    return "test" if share < valid + test else "train"


def named_split(path: Path) -> str | None:
    """The split that a relative path names, as in valid-00001.jsonl, shard.test.txt.gz or train/a.txt."""
    words = re.split(r"[._/-]", path.as_posix().lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def source_files(source: Path) -> list[Path]:
    """The file itself, or the files under a folder and under its links, sorted, each once. None of them is hidden."""
    if source.is_file():
        return [source]
    found = {}  # the real path of each folder and file -> the first under which it was found

    def closed(error: OSError):
        if isinstance(error, PermissionError):
            say_unread(source, "they may not be opened", error.filename)

    for folder, inside, names in os.walk(source, followlinks=True, onerror=closed):
        if found.setdefault(os.path.realpath(folder), folder) != folder:  # two links lead here, or a circle of them
            inside.clear()
            continue
        inside[:] = [name for name in sorted(inside) if not name.startswith(".")]
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_file():  # a pipe and a broken link are none
                found.setdefault(os.path.realpath(path), path)
    return sorted(path for path in found.values() if isinstance(path, Path))


def text_files(source: Path, *endings: str) -> list[Path]:
    """The `source_files` that may hold documents, with one of the endings; says in a line which are not read."""
    found, left = [], []
    for path in source_files(source):
        name = uncompressed_name(path).lower()
        if path == source or (name.endswith(endings or "") and not NO_TEXT.search(name)):
            found.append(path)
        else:
            left.append(path.name)
    say_unread(source, "by their names they hold no text for training; a file given alone is read", *left)
    return found


def say_unread(source: Path, why: str, *names: str):
    if names:
        say(f"not read in {source}: {len(names):,} files ({', '.join(names[:3])}), as {why}")


def one_of(folder: Path, *names: str) -> Path:
    """The first of these files that the folder has, plain or compressed."""
    for name in names:
        for suffix in ("", ".gz", ".xz"):
            path = folder / f"{name}{suffix}"
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {' or '.join(names)} (plain, .gz or .xz) in {folder}")


def uncompressed_name(path: Path) -> str:
    return re.sub(r"\.(gz|xz)$", "", path.name, flags=re.IGNORECASE)


# ---------------------------------------------------------------------------------------------------------------------
# Lines and documents


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, each with a line feed, without the byte order mark that some programs begin it with.

    Lines may end in CR LF. A lone CR ends a line only where a file has no line feed; elsewhere it is part of a text, so
    that files of pairs stay aligned.
    """
    open_file = COMPRESSED.get(path.suffix.lower(), open)
    try:
        with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if 3 * line.count("\0") > len(line):
                    raise ValueError(f"{path} is not UTF-8: line {number:,} has bytes of 0, as UTF-16 has")
                is_all = number == 1 and not line.endswith("\n")
                text = line.removesuffix("\n").removesuffix("\r")
                for part in text.split("\r") if is_all else [text]:
                    yield f"{part}\n"
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_documents(path: Path, blocks: bool = False) -> Iterator[str]:
    """The documents of a file: the rows of Parquet and of JSON lines, and the blocks or lines of plain text.

    JSON lines are known by the name. In plain text every line is a document, but where blank lines are regular (or
    `blocks` says so) the blocks between them are.
    """
    name = uncompressed_name(path).lower()
    if UNREAD.search(name):
        raise ValueError(f"{path} is not read: give its text as plain text, JSON lines or Parquet, plain, .gz or .xz")
    if name.endswith(".parquet"):
        yield from read_parquet(path)
        return
    lines = read_lines(path)
    head = list(islice(lines, HEAD))
    lines = chain(head, lines)
    if name.endswith(JSON):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = {}
                with suppress(ValueError, RecursionError):  # the second where it is nested too deeply
                    row = json.loads(line)
                text = row.get("text") if isinstance(row, dict) else None
                if not isinstance(text, str):
                    raise ValueError(f"{path}, line {number}: no JSON object with a string named 'text'")
                yield text
    elif blocks or are_blocks(head):
        say(f"{path.parent}: every block between blank lines is a document")
        for is_blank, block in groupby(lines, key=str.isspace):
            while not is_blank and (part := list(islice(block, LONGEST_BLOCK))):
                yield "".join(part).strip()
    else:
        say(f"{path.parent}: every line is a document")
        yield from filter(None, map(str.strip, lines))


@cache
def say(line: str):
    """Once, however many files of a folder it is true of."""
    print(line, file=sys.stderr)


def are_blocks(head: list[str]) -> bool:
    """Whether blank lines are regular: most of the lines are in blocks of 100 at most, of which there are two."""
    sizes = [block.count("\n") for block in re.split(r"\n(?:[^\S\n]*\n)+", "".join(head).strip() + "\n")]
    return len(sizes) > 1 and 2 * sum(size for size in sizes if size <= 100) >= sum(sizes)


def read_parquet(path: Path) -> Iterator[str]:
    """The column "text"; a missing value is an empty text."""
    from pyarrow import ArrowException, parquet  # not above: no other file needs it

    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64, columns=["text"]):
            texts = batch["text"].cast("large_string").to_pylist()
            yield from (text or "" for text in texts)
    except (ArrowException, KeyError, OSError, UnicodeDecodeError) as error:  # a damaged file gives any of these
        raise ValueError(f"{path} cannot be read: {error}".splitlines()[0]) from error


def has_words(text: str) -> bool:
    """Whether blanks part its words. In Greenlandic these have 15 letters in the mean; in Thai blanks part phrases."""
    words = text.split()
    return sum(map(len, words)) < 16 * len(words)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


def read_pairs(*paths: Path) -> Iterator[tuple[str, str]]:
    """The lines of two aligned files or of one .tsv, stripped. A line without two texts is a ValueError."""
    if len(paths) == 1:
        rows = (line.split("\t") for line in read_lines(paths[0]))
    else:
        rows = zip_longest(*map(read_lines, paths), fillvalue="")
    for number, row in enumerate(rows, start=1):
        texts = tuple(text.strip() for text in row)
        if len(texts) != 2 or not all(texts):
            names = " and ".join(path.name for path in paths)
            raise ValueError(f"{names} in {paths[0].parent}, line {number}: not two texts")
        yield texts


def read_sides(folder: Path, sides: tuple[str, str], *names: str) -> Iterator[tuple[str, str]]:
    """The lines of NAME.de beside those of NAME.en, where `sides` are de and en, of the first name that there is."""
    return read_pairs(*[one_of(folder, *(f"{name}.{side}" for name in names)) for side in sides])


# ---------------------------------------------------------------------------------------------------------------------
# Prepared folders: data/prepare.py writes them, and data/folder.py reads them

PREPARED = Path(__file__).parent / "prepared"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(meta: dict) -> str:
    """One hash of the data: of every file, count and the tokenizer, but not of where they come from."""
    place = ("name", "source", "versions", "checksum")
    data = {key: meta[key] for key in meta if key not in place}
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
