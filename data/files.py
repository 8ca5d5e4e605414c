"""Reading files: lines, documents, aligned texts and message catalogs, plain or compressed, and what splits they name.

Every reader is a generator, so that no file is ever held in memory whole but a message catalog. What is wrong with a
file is a ValueError or an OSError of one line that names the file, and the line or the byte.
"""

import gzip
import hashlib
import itertools
import json
import lzma
import re
import struct
from collections.abc import Iterator
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
HEAD = 1000  # lines of a text file that tell whether its documents are blocks or lines


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
    """The file itself, or every visible file under a folder, sorted. FileNotFoundError when there is none."""
    if source.is_file():
        return [source]
    files = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))
    if not files:
        raise FileNotFoundError(f"--source {source} " + ("holds no file" if source.is_dir() else "does not exist"))
    return files


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


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of a UTF-8 file, plain, .gz or .xz; ValueError gives the byte offset of what is not UTF-8."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    offset = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode()
                offset += len(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {offset + error.start}") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_documents(path: Path, least: int = HEAD) -> Iterator[str]:
    """The documents of one file, by its extension (before any .gz or .xz); `least` as in read_blocks."""
    suffix = Path(uncompressed_name(path)).suffix
    if suffix == ".jsonl":
        return read_jsonl(path)
    if suffix == ".parquet":
        return read_parquet(path)
    return read_blocks(path, least)


def read_blocks(path: Path, least: int) -> Iterator[str]:
    """The blocks between blank lines; every line, where the first 1,000 have no blank one and are `least` or more."""
    lines = (line for _, line in read_lines(path))
    head = list(itertools.islice(lines, HEAD))
    line_by_line = len(head) >= least and all(line.strip() for line in head)
    block = ""
    for line in itertools.chain(head, lines):
        if line.strip():
            block += line
        if block and (line_by_line or not line.strip()):
            yield block
            block = ""
    if block:
        yield block


def read_jsonl(path: Path) -> Iterator[str]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
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
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged: {error}".splitlines()[0]) from error
    if "text" not in file.schema_arrow.names:
        raise ValueError(f"{path} has no 'text' column")
    for batch in file.iter_batches(batch_size=1024, columns=["text"]):
        for document in batch.column("text").to_pylist():
            if document:
                yield document


# ---------------------------------------------------------------------------------------------------------------------
# aligned texts


def aligned_files(source: Path) -> dict[Path, list[Path]]:
    """Path without its ending -> its one .tsv file, or the files of its two sides in the order of the pair's name.

    The name up to the first dot is the pair: de-en.train.de.gz and de-en.train.en.gz, or de-en.train.tsv.
    """
    found: dict[Path, dict[str, Path]] = {}  # path without its ending -> ending -> file
    for path in source_files(source):
        stem, _, ending = uncompressed_name(path).rpartition(".")
        pair = stem.split(".")[0]
        is_side = pair.startswith(f"{ending}-") or pair.endswith(f"-{ending}")
        if is_side or (ending == "tsv" and "-" in pair):
            files = found.setdefault(path.with_name(stem), {})
            if ending in files:
                raise ValueError(f"{files[ending]} and {path} are the same side of the same pairs: leave one of them")
            files[ending] = path
    if not found:
        what = "no two files such as de-en.de and de-en.en, and no de-en.tsv (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {source} holds {what}")
    return {stem: in_order(stem, files) for stem, files in found.items()}


def in_order(stem: Path, files: dict[str, Path]) -> list[Path]:
    pair = stem.name.split(".")[0]
    if list(files) == ["tsv"]:
        return [files["tsv"]]
    for first, second in itertools.permutations(files, 2):
        if len(files) == 2 and f"{first}-{second}" == pair:
            return [files[first], files[second]]
    names = " and ".join(path.name for path in files.values())
    raise ValueError(f"{stem}.* must be one .tsv file or the two sides of {pair}, not {names}")


def read_pairs(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The pairs of one .tsv file or of two aligned ones, stripped. ValueError says which line is wrong, and why."""
    rows = read_tsv(*paths) if len(paths) == 1 else read_aligned(*paths)
    for number, first, second in rows:
        for text, path in ((first, paths[0]), (second, paths[-1])):
            if not text.strip():
                raise ValueError(f"{path}, line {number}: an empty text")
        yield first.strip(), second.strip()


def read_tsv(path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in read_lines(path):
        tabs = line.count("\t")
        if tabs != 1:
            raise ValueError(f"{path}, line {number}: {tabs} tabs instead of one")
        first, second = line.split("\t")
        yield number, first, second


def read_aligned(one: Path, two: Path) -> Iterator[tuple[int, str, str]]:
    lengths = [0, 0]
    nothing = (0, None)
    for (number, first), (_, second) in itertools.zip_longest(read_lines(one), read_lines(two), fillvalue=nothing):
        lengths[0] += first is not None
        lengths[1] += second is not None
        if first is not None and second is not None:
            yield number, first, second
    if lengths[0] != lengths[1]:
        raise ValueError(f"{one} has {lengths[0]:,} lines and {two} {lengths[1]:,}")


# ---------------------------------------------------------------------------------------------------------------------
# message catalogs


def read_catalog(path: Path) -> Iterator[tuple[str, str, str]]:
    """(singular, English, message) of every translation in a .mo file; a plural gives its first and its last form.

    Context is dropped. ValueError when the file is damaged.
    """
    try:
        entries = read_mo(path.read_bytes())
    except (struct.error, ValueError, LookupError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for key, text in entries:
        english = key.split("\x04")[-1].split("\0")
        forms = text.split("\0")
        for source, message in {(english[0], forms[0]), (english[-1], forms[-1])}:
            # the header is the translation of nothing
            if source.strip() and message.strip():
                yield english[0], source, message


def read_mo(data: bytes) -> list[tuple[str, str]]:
    """The (key, text) entries of a gettext .mo file: two tables of (length, offset), and the texts."""
    order = "<" if data[:4] == bytes.fromhex("de120495") else ">"
    magic, _, count, keys_at, texts_at = struct.unpack_from(f"{order}5I", data)
    if magic != 0x950412DE:
        raise ValueError("no .mo file")
    keys, texts = [], []
    for found, table in ((keys, keys_at), (texts, texts_at)):
        for row in range(count):
            length, offset = struct.unpack_from(f"{order}2I", data, table + 8 * row)
            found.append(data[offset : offset + length])
            if data[offset + length : offset + length + 1] != b"\0":
                raise ValueError(f"no text of {length} bytes at byte {offset}")
    header = dict(zip(keys, texts)).get(b"", b"")
    named = re.search(rb"charset=([\w-]+)", header)
    charset = named[1].decode() if named else "utf-8"
    return [(key.decode(charset), text.decode(charset)) for key, text in zip(keys, texts)]
