"""The corpora of one language, each a function (source, streaming) -> iterator of (split, text), a text a document.

    pydocs        docstrings of the installed Python, NumPy and PyTorch (nothing is downloaded)
    wikitext103   WikiText-103, raw
    openwebtext   OpenWebText
    text          your own UTF-8 files

`source` is a file or folder to read instead of the network. `streaming` reads documents off the network one by one
rather than downloading all of them first. No corpus but pydocs is ever held in memory whole.
"""

import functools
import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

SPLITS = ("train", "valid", "test")
HEAD = 1000  # lines of a text file that tell whether its documents are blocks or lines
Documents = Iterator[tuple[str, str]]  # (split, text)


class Corpus(NamedTuple):
    read: Callable  # (source, streaming) -> Documents, or {language: Documents}
    origin: str | None  # where it comes from without `source`; None: it needs one
    packages: tuple[str, ...] = ()  # read from these; such a corpus trains its own tokenizer
    vocabulary: Callable | None = None  # `read` of the corpus whose tokenizer it shares; None: its own
    pieces: int | None = None  # of a BPE that both sides of its translation pairs share, trained on them


def split_of(key: str, valid: float, test: float) -> str:
    """The split that a hash of `key` falls into, given the shares of valid and test; equal keys never part."""
    digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "valid" if share < valid else "test" if share < valid + test else "train"


# ---------------------------------------------------------------------------------------------------------------------
# pydocs


def pydocs(source: Path | None, streaming: bool) -> Documents:
    """Documents are source files, their docstrings joined by blank lines; a docstring is kept where it first appears.

    With `source` the .py files of that folder take the place of the installed packages.
    """
    roots = {source.name: source} if source else installed_roots()
    files = python_files(roots)
    if not files:
        raise FileNotFoundError(f"no .py file in {source}")
    seen: set[str] = set()
    for (name, _), texts in zip(files, read_docstrings([path for _, path in files]), strict=True):
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            yield split_of(f"split/{name}", valid=0.045, test=0.045), "\n\n".join(new)


def installed_roots() -> dict[str, Path]:
    """Package name -> folder, found without importing anything."""
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in ("numpy", "torch"):
        roots[package] = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    return roots


def python_files(roots: dict[str, Path]) -> list[tuple[str, Path]]:
    """(package/relative/path.py, path) of every source file under the roots, sorted, tests left out."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for package, root in roots.items():
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            paths = [Path(folder, name) for name in names if name.endswith(".py")]
            files += [(f"{package}/{path.relative_to(root).as_posix()}", path) for path in paths]
    return sorted(files)


def read_docstrings(paths: list[Path]) -> Iterator[list[str]]:
    """docstrings.docstrings of every path, in order, by helper processes that import neither torch nor this package."""
    helper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("docstrings.py"))]

    def read(shard: list[Path]) -> list[list[str]]:
        request = json.dumps([str(path) for path in shard])
        return json.loads(subprocess.run(helper, input=request, stdout=subprocess.PIPE, text=True, check=True).stdout)

    cores = os.cpu_count() or 1
    shards = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(cores) as pool, tqdm(total=len(paths), desc="reading", unit="file", disable=None) as bar:
        for texts in pool.map(read, shards):
            bar.update(len(texts))
            yield from texts


# ---------------------------------------------------------------------------------------------------------------------
# wikitext103, openwebtext


def wikitext103(source: Path | None, streaming: bool) -> Documents:
    """Documents are articles, cut at the top-level headings ` = Title = `; the splits are the corpus's own."""
    # valid and test first, so that a limit on the training tokens can end the reading
    for split, name in (("valid", "validation"), ("test", "test"), ("train", "train")):
        if source:
            lines = (line for _, line in read_lines(one_of(source, f"wiki.{split}.raw", f"wiki.{split}.tokens")))
        else:
            rows = hub_rows("Salesforce/wikitext", "wikitext-103-raw-v1", name, streaming)
            lines = (row or " \n" for row in rows)  # the hub's rows are the file's lines, its blank ones emptied
        yield from ((split, article) for article in articles(lines))


def one_of(folder: Path, *names: str) -> Path:
    """The first of these files that is in `folder`, perhaps compressed."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz", ".xz")]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no {' or '.join(names)} (plain, .gz or .xz) in {folder}")
    return found


def articles(lines: Iterator[str]) -> Iterator[str]:
    """Join the lines between two top-level headings; a heading is one only after a blank line."""
    article: list[str] = []
    for line in lines:
        heading = re.fullmatch(r" = .*(?<! =) = \n?", line) and (not article or not article[-1].strip())
        if heading and any(part.strip() for part in article):
            yield "".join(article)
            article = []
        article.append(line)
    if any(part.strip() for part in article):
        yield "".join(article)


def openwebtext(source: Path | None, streaming: bool) -> Documents:
    """Documents are web pages; a hash of the text sends 0.05% to valid and as many to test."""
    if source:
        texts = (text for path in source_files(source) for text in read_documents(path))
    else:
        texts = hub_rows("Skylion007/openwebtext", None, "train", streaming)
    yield from ((split_of(text, valid=0.0005, test=0.0005), text) for text in texts)


def hub_rows(
    repository: str,
    config: str | None,
    split: str,
    streaming: bool,
    column: str | tuple[str, ...] = "text",
    **options,
) -> Iterator:
    """A column of a data set on the Hugging Face hub, or of the `data_files` among `options`; or several as a tuple.

    Those of a tuple may lie in one another ("translation.de"), and what is missing there is an empty text.
    """
    what = options.get("data_files") or " ".join(filter(None, (repository, config)))
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{what} needs Hugging Face datasets: pip install datasets, or pass a local copy with --source"
        ) from error
    try:
        for row in load_dataset(repository, config, split=split, streaming=streaming, **options):
            yield row[column] if isinstance(column, str) else tuple(inner(row, name) or "" for name in column)
    except Exception as error:  # the hub's client raises a dozen kinds
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OSError(f"cannot read {what} ({reason}); a local copy goes in with --source") from error


def inner(row: dict, name: str):
    """ "translation.de": what row["translation"]["de"] is."""
    return functools.reduce(lambda value, part: value[part], name.split("."), row)


# ---------------------------------------------------------------------------------------------------------------------
# text: the user's own files


def text(source: Path, streaming: bool) -> Documents:
    """Documents are rows (.jsonl, .parquet) or blocks between blank lines (anything else).

    Where names inside a folder speak of train, valid and test, those files are the splits and the others are not read.
    Otherwise a hash of the text sends 1% of the documents to valid and as many to test.
    """
    files = source_files(source)
    named = {path: named_split(path.relative_to(source)) for path in files} if source.is_dir() else {}
    if any(named.values()):
        for split in ("valid", "test", "train"):  # as for wikitext103
            chosen = (path for path in files if named[path] == split)
            yield from ((split, document) for path in chosen for document in read_documents(path))
    else:
        documents = (document for path in files for document in read_documents(path))
        yield from ((split_of(document, valid=0.01, test=0.01), document) for document in documents)


def source_files(source: Path) -> list[Path]:
    """The file itself, or every visible file under a folder, sorted. FileNotFoundError when there is none."""
    if source.is_file():
        return [source]
    files = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))
    if not files:
        raise FileNotFoundError(f"--source {source} " + ("holds no file" if source.is_dir() else "does not exist"))
    return files


def named_split(path: Path) -> str | None:
    """The split that a relative path names in one of its parts: valid-00001.jsonl, shard.test.txt.gz, train/a.txt."""
    aliases = {"val": "valid", "validation": "valid", "dev": "valid"} | {split: split for split in SPLITS}
    return next((aliases[part] for part in re.split(r"[._/-]", path.as_posix().lower()) if part in aliases), None)


def read_documents(path: Path, least: int = HEAD) -> Iterator[str]:
    """The documents of one file, by its extension (before any .gz or .xz); `least` as in read_blocks."""
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".xz") else path.suffix
    readers = {".jsonl": read_jsonl, ".parquet": read_parquet}
    yield from readers[suffix](path) if suffix in readers else read_blocks(path, least)


def read_blocks(path: Path, least: int) -> Iterator[str]:
    """The blocks between blank lines; every line, where the first 1,000 have no blank one and are `least` or more."""
    lines = (line for _, line in read_lines(path))
    head = list(itertools.islice(lines, HEAD))
    if len(head) >= least and all(map(str.strip, head)):
        yield from (line for line in itertools.chain(head, lines) if line.strip())
        return
    block: list[str] = []
    for line in itertools.chain(head, lines):
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block)
            block = []
    if block:
        yield "".join(block)


def read_jsonl(path: Path) -> Iterator[str]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON") from error
        match row:
            case {"text": str(document)}:
                yield document
            case _:
                raise ValueError(f"{path}, line {number}: no string named 'text'")


def read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow: pip install pyarrow") from error
    file = pyarrow.parquet.ParquetFile(path)
    if "text" not in file.schema_arrow.names:
        raise ValueError(f"{path} has no 'text' column")
    for batch in file.iter_batches(batch_size=1024, columns=["text"]):
        yield from (document for document in batch.column("text").to_pylist() if document)


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


CORPORA = {
    "pydocs": Corpus(pydocs, "docstrings of the installed Python, NumPy and PyTorch", ("numpy", "torch")),
    "wikitext103": Corpus(wikitext103, "Salesforce/wikitext, wikitext-103-raw-v1"),
    "openwebtext": Corpus(openwebtext, "Skylion007/openwebtext"),
    "text": Corpus(text, None),
}
