"""Readers of the files that texts come in: documents, translation pairs and message catalogs, plain, .gz or .xz.

What cannot be read is a ValueError or an OSError of one line, with the file and, where it is known, the line or byte.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import struct
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {name: name for name in SPLITS} | {"val": "valid", "validation": "valid", "dev": "valid"}
HEAD = 1000  # lines at the beginning of a text file that decide what its documents are
LONGEST_LINE = 1 << 27  # bytes
LONGEST_BLOCK = 10_000_000  # characters, about: a longer one is several documents
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}
JSON = (".json", ".jsonl", ".ndjson")
# Names of files without text, and of those that may hold some in a form that is not read
NO_TEXT = re.compile(
    r"^(readme|licen[cs]e|notice|dataset_infos?)\b|\.(png|jpe?g|gif|webp|svg|ico|mp[34]|wav|flac|avi|so|dll|exe|pyc"
    r"|np[yz]|bin|pth?|safetensors|ckpt|pkl|h5|db|sqlite|lock|idx)$"
)
UNREAD = re.compile(r"\.(csv|zst|bz2|zip|tar|tgz|7z|rar|pdf|docx?|epub|arrow|feather|avro|orc|tfrecord)$")
found_in = defaultdict(dict)  # what the documents of a file are -> file -> how many: said by data.prepare


def split_of(key: str, valid: float, test: float) -> str:
    """The split that a hash of `key` chooses, given the shares of valid and test. Equal keys share a split."""
    digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < valid:
        return "valid"
    return "test" if share < valid + test else "train"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named_split(path: Path) -> str | None:
    """The split that a relative path names, as in valid-00001.jsonl, shard.test.txt.gz or train/a.txt."""
    for word in re.split(r"[._/-]", path.as_posix().lower()):
        if word in SPLIT_NAMES:
            return SPLIT_NAMES[word]
    return None


def source_files(source: Path, skipped: dict[str, list] | None = None, seen: set | None = None) -> list[Path]:
    """The file itself, or the files under a folder and under those that it links to, each once, sorted. None is hidden.

    skipped: why -> names that are left out, filled in. seen: the real paths of what has been found.
    """
    if source.is_file():
        return [source]
    skipped = defaultdict(list) if skipped is None else skipped
    seen = {os.path.realpath(source)} if seen is None else seen
    found = []
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        real = os.path.realpath(path)
        if path.name.startswith("."):
            skipped["hidden"].append(path.name)
        elif real in seen:
            skipped["there twice"].append(path.name)
        elif not path.is_file() and not path.is_dir():
            skipped["no file"].append(path.name)
        else:
            seen.add(real)
            found += source_files(path, skipped, seen)
    return sorted(found)


def text_files(source: Path, *endings: str) -> list[Path]:
    """The `source_files` that may hold documents, with one of the endings; says in a line what is not read, and why."""
    skipped, found = defaultdict(list), []
    for path in source_files(source, skipped):
        name = uncompressed_name(path).lower()
        if path == source or (name.endswith(endings or "") and not NO_TEXT.search(name)):
            found.append(path)
        else:
            skipped["no data"].append(path.name)
    if skipped:
        told = [f"{len(names):,} {why} ({names[0]})" for why, names in skipped.items()]
        print(f"not read in {source}: {', '.join(told)}", file=sys.stderr)
    return found


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
    """The lines of a UTF-8 file with their line ends, without the byte order mark that some programs begin it with."""
    offset = 0
    try:
        with COMPRESSED.get(path.suffix.lower(), open)(path, "rb") as file:
            for line in iter(partial(file.readline, LONGEST_LINE), b""):
                if len(line) == LONGEST_LINE:
                    raise ValueError(f"{path} has a line of {LONGEST_LINE:,} bytes or more, at byte {offset:,}")
                if b"\0" in line:
                    raise ValueError(f"{path} is not UTF-8 text: byte {offset + line.index(0)} is NUL, as in UTF-16")
                text = line.decode()
                yield text if offset else text.removeprefix("\ufeff")
                offset += len(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {offset + error.start}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_documents(path: Path, blocks: bool = False) -> Iterator[str]:
    """The documents of a file: the rows of Parquet and of JSON lines, and the blocks or lines of plain text.

    JSON lines are known by a first line that is a JSON object with a "text", or by the name. In plain text every line
    is a document, but where blank lines are regular (or `blocks` says so) the blocks between them are.
    """
    name = uncompressed_name(path).lower()
    if name.endswith(".parquet"):
        what, documents = "the rows", read_parquet(path)
    elif UNREAD.search(name):
        raise ValueError(f"{path} is not read: give its text as plain text, JSON lines or Parquet, plain, .gz or .xz")
    else:
        lines = read_lines(path)
        head = list(islice(lines, HEAD))
        lines = chain(head, lines)
        first = parse(next((line for line in head if line.strip()), ""))
        if name.endswith(JSON) or (isinstance(first, dict) and "text" in first):
            what, documents = "the JSON lines", json_rows(path, lines)
        elif blocks or are_blocks(head):
            what, documents = "the blocks between blank lines", read_blocks(lines)
        else:
            what, documents = "the lines", filter(None, map(str.strip, lines))
    counts = found_in[what]
    counts[path] = 0
    for document in documents:
        counts[path] += 1
        yield document


def are_blocks(head: list[str]) -> bool:
    """Whether blank lines are regular: most of the lines are in blocks of 100 at most, of which there are two."""
    sizes = [block.count("\n") for block in re.split(r"\n(?:[^\S\n]*\n)+", "".join(head).strip() + "\n")]
    return len(sizes) > 1 and 2 * sum(size for size in sizes if size <= 100) >= sum(sizes)


def read_blocks(lines: Iterable[str]) -> Iterator[str]:
    block, size = [], 0
    for line in chain(lines, [""]):
        if line.strip():
            block.append(line)
            size += len(line)
        if block and (not line.strip() or size > LONGEST_BLOCK):
            yield "".join(block).strip()
            block, size = [], 0


def parse(line: str):
    """The JSON in a line, or None."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)


def json_rows(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """The "text" of every line; blank lines are passed over."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse(line)
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f"{path}, line {number}: no JSON object with a string named 'text'")
        yield row["text"]


def read_parquet(path: Path) -> Iterator[str]:
    """The column "text"; a missing value is an empty text."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow: pip install pyarrow") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise ValueError(f"{path} has no 'text' column")
        for batch in file.iter_batches(batch_size=64, columns=["text"]):
            for text in batch.column("text").to_pylist():
                if not isinstance(text or "", str):
                    raise ValueError(f"{path} has a 'text' that is no string: {text!r:.50}")
                yield text or ""
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # a damaged file gives any of these
        raise ValueError(f"{path} cannot be read: {error}".splitlines()[0]) from error


def aligned_files(source: Path) -> dict[str, list[tuple[Path, ...]]]:
    """The files of each pair of languages: (de-en.de, de-en.en) with a language each, or (de-en.tsv,) with both.

    A name may say more between the pair and the ending, as in de-en.train.de.gz beside de-en.train.en.
    """
    pairs = defaultdict(list)
    for path in source_files(source):
        stem, _, ending = uncompressed_name(path).rpartition(".")
        pair = stem.split(".")[0]
        if ending == "tsv" and "-" in pair:
            pairs[pair].append((path,))
        elif pair.startswith(f"{ending}-"):
            second = pair.removeprefix(f"{ending}-")
            pairs[pair].append((path, one_of(path.parent, f"{stem}.{second}")))
    if not pairs:
        what = "no file such as de-en.de, beside de-en.en, or de-en.tsv (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {source} holds {what}")
    return pairs


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


def read_catalog(path: Path) -> Iterator[tuple[str, str, str]]:
    """(singular, English, message) of the translations in a .mo file; a plural gives its first and its last form.

    Python's gettext reads such files too, but does not give the English plural.
    """
    try:
        entries = read_mo(path.read_bytes())
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for key, text in entries:
        english = key.split("\x04")[-1].split("\0")  # a context may stand before it
        forms = text.split("\0")
        for source, message in {(english[0], forms[0]), (english[-1], forms[-1])}:
            if source.strip() and message.strip():  # the file's header is the translation of nothing
                yield english[0], source, message


def read_mo(data: bytes) -> list[tuple[str, str]]:
    """The (key, text) entries of a gettext .mo file: two tables of lengths and offsets, and the UTF-8 texts."""
    magic, _, count, keys, texts = struct.unpack_from("<5I", data)
    if magic != 0x950412DE:
        raise ValueError("no .mo file")
    return list(zip(mo_column(data, keys, count), mo_column(data, texts, count), strict=True))


def mo_column(data: bytes, table: int, count: int) -> list[str]:
    column = []
    for length, offset in struct.iter_unpack("<2I", data[table : table + 8 * count]):
        text = data[offset : offset + length + 1]
        if len(text) <= length:
            raise ValueError(f"no text of {length} bytes at byte {offset}")
        column.append(text[:-1].decode())
    return column
