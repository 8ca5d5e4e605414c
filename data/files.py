"""Reading files: lines, documents, aligned texts and message catalogs, plain or compressed, and what splits they name.

Every reader is a generator, so that no file is ever held in memory whole but a message catalog. What is wrong with a
file is a ValueError or an OSError of one line that names the file, and the line or the byte.
"""

import gzip
import hashlib
import json
import lzma
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {
    "train": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
}


def split_of(key: str, valid: float, test: float) -> str:
    """The split that a hash of `key` falls into, given the shares of valid and test; equal keys never part."""
    digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < valid:
        return "valid"
    return "test" if share < valid + test else "train"


def named_split(path: Path) -> str | None:
    """The split that a relative path names in one of its parts: valid-00001.jsonl, shard.test.txt.gz, train/a.txt."""
    for part in re.split(r"[._/-]", path.as_posix().lower()):
        if part in SPLIT_NAMES:
            return SPLIT_NAMES[part]
    return None


# ---------------------------------------------------------------------------------------------------------------------
# which files


def source_files(source: Path) -> list[Path]:
    """The file itself, or every visible file under a folder, sorted."""
    if source.is_file():
        return [source]
    return sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))


def one_of(folder: Path, *names: str) -> Path:
    """The first of these files that is in `folder`, perhaps compressed."""
    for name in names:
        for suffix in ("", ".gz", ".xz"):
            path = folder / f"{name}{suffix}"
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {' or '.join(names)} (plain, .gz or .xz) in {folder}")


def uncompressed_name(path: Path) -> str:
    return re.sub(r"\.(gz|xz)$", "", path.name)


# ---------------------------------------------------------------------------------------------------------------------
# lines and documents


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain, .gz or .xz, without the mark that some programs begin it with.

    ValueError gives the byte offset of what is not UTF-8.
    """
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
    """The documents of one file, by its extension (before any .gz or .xz)."""
    suffix = Path(uncompressed_name(path)).suffix
    readers = {".jsonl": read_jsonl, ".parquet": read_parquet}
    return readers.get(suffix, read_blocks)(path)


def read_blocks(path: Path) -> Iterator[str]:
    """The blocks between blank lines, stripped, or every line where the first 1,000 have no blank one among them."""
    lines = read_lines(path)
    head = list(islice(lines, 1000))
    line_by_line = all(line.strip() for line in head)
    block = ""
    for line in chain(head, lines, [""]):
        block += line
        if line_by_line or not line.strip():
            if block.strip():
                yield block.strip()
            block = ""


def read_jsonl(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
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
            for document in batch.column("text").to_pylist():
                if not isinstance(document or "", str):
                    raise ValueError(f"{path} has a 'text' that is no string: {document!r:.50}")
                yield document or ""
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # damage shows itself in all of these ways
        raise ValueError(f"{path} cannot be read: {error}".splitlines()[0]) from error


# ---------------------------------------------------------------------------------------------------------------------
# aligned texts


def aligned_files(source: Path) -> dict[str, list[tuple[Path, ...]]]:
    """Pair of languages -> its files, two and two: de-en.de and de-en.en, or de-en.train.de.gz and de-en.train.en; or
    one by one: de-en.train.tsv.

    The name up to the first dot is the pair. A file of the first language needs its other side.
    """
    pairs = defaultdict(list)
    for path in source_files(source):
        stem, _, ending = uncompressed_name(path).rpartition(".")
        pair = stem.split(".")[0]
        if pair.startswith(f"{ending}-"):
            second = pair.removeprefix(f"{ending}-")
            pairs[pair].append((path, one_of(path.parent, f"{stem}.{second}")))
        elif ending == "tsv" and "-" in pair:
            pairs[pair].append((path,))
    if not pairs:
        what = "no file such as de-en.de, beside de-en.en, or de-en.tsv (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {source} holds {what}")
    return pairs


def read_pairs(*paths: Path) -> Iterator[tuple[str, str]]:
    """The lines of two aligned files, or of one .tsv, stripped. ValueError where a line has not two texts."""
    if len(paths) == 1:
        rows = (line.split("\t") for line in read_lines(paths[0]))
    else:
        rows = zip_longest(*map(read_lines, paths), fillvalue="")
    for number, row in enumerate(rows, start=1):
        texts = [text.strip() for text in row]
        if len(texts) != 2 or not all(texts):
            names = " and ".join(path.name for path in paths)
            raise ValueError(f"{names} in {paths[0].parent}, line {number}: not two texts")
        yield tuple(texts)


# ---------------------------------------------------------------------------------------------------------------------
# message catalogs


def read_catalog(path: Path) -> Iterator[tuple[str, str, str]]:
    """(singular, English, message) of every translation in a .mo file; a plural gives its first and its last form.

    Context is dropped. ValueError when the file is damaged.
    """
    try:
        entries = read_mo(path.read_bytes())
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for key, text in entries:
        english = key.split("\x04")[-1].split("\0")
        forms = text.split("\0")
        for source, message in {(english[0], forms[0]), (english[-1], forms[-1])}:
            # the header is the translation of nothing
            if source.strip() and message.strip():
                yield english[0], source, message


def read_mo(data: bytes) -> list[tuple[str, str]]:
    """The (key, text) entries of a gettext .mo file in UTF-8: two tables of (length, offset), and the texts."""
    magic, _, count, *tables = struct.unpack_from("<5I", data)
    if magic != 0x950412DE:
        raise ValueError("no .mo file")
    columns = []
    for table in tables:
        column = []
        for length, offset in struct.iter_unpack("<2I", data[table : table + 8 * count]):
            text = data[offset : offset + length + 1]
            if len(text) <= length:
                raise ValueError(f"no text of {length} bytes at byte {offset}")
            column.append(text[:-1].decode())
        columns.append(column)
    return list(zip(*columns, strict=True))
