"""Readers of the files that texts come in: documents, translation pairs and message catalogs, plain, .gz or .xz.

All but catalogs are read piece by piece. A file that cannot be read is a ValueError or an OSError of one line, which
names the file and, where it is known, the line or the byte.
"""

import gzip
import hashlib
import json
import lzma
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {name: name for name in SPLITS} | {"val": "valid", "validation": "valid", "dev": "valid"}
HEAD = 1000  # lines at the beginning of a text file that decide what its documents are


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


def source_files(source: Path) -> list[Path]:
    """The file itself, or the files under a folder, sorted. Hidden files and what is in hidden folders are left out."""
    if source.is_file():
        return [source]
    files = []
    for path in sorted(source.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if path.is_file() and not hidden:
            files.append(path)
    return files


def one_of(folder: Path, *names: str) -> Path:
    """The first of these files that the folder has, plain or compressed."""
    for name in names:
        for suffix in ("", ".gz", ".xz"):
            path = folder / f"{name}{suffix}"
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {' or '.join(names)} (plain, .gz or .xz) in {folder}")


def uncompressed_name(path: Path) -> str:
    return re.sub(r"\.(gz|xz)$", "", path.name)


# ---------------------------------------------------------------------------------------------------------------------
# Lines and documents


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their line ends, without the byte order mark that some programs begin it with."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    offset = 0
    try:
        with opener(path, "rb") as file:
            for line in file:
                text = line.decode()
                yield text if offset else text.removeprefix("\ufeff")
                offset += len(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {offset + error.start}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a file: the rows of Parquet and of JSON lines, and the blocks or lines of plain text.

    JSON lines are known by the name .jsonl, or by a first line that is a JSON object with a "text". In plain text blank
    lines separate documents; where none of the first 1,000 lines is blank, every line is a document.
    """
    name = uncompressed_name(path)
    if name.endswith(".parquet"):
        yield from read_parquet(path)
        return
    lines = read_lines(path)
    head = list(islice(lines, HEAD))
    lines = chain(head, lines)
    if name.endswith(".jsonl") or (head and is_json_row(head[0])):
        yield from json_rows(path, lines)
    elif all(line.strip() for line in head):
        yield from filter(None, map(str.strip, lines))
    else:
        for has_text, block in groupby(lines, key=lambda line: bool(line.strip())):
            if has_text:
                yield "".join(block).strip()


def is_json_row(line: str) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "text" in row


def json_rows(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """The "text" of every line; blank lines are passed over."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f"{path}, line {number}: no string named 'text'")
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
        for batch in file.iter_batches(batch_size=1024, columns=["text"]):
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
