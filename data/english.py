"""English prose from installed packages: the documentation in their Python files.

The files are parsed with `ast`, never imported or run.
"""

import ast
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

from data.files import Records, progress, split_of

ROOTS = {"python": Path(sysconfig.get_path("stdlib"))}
for name in ("numpy", "torch"):
    ROOTS[name] = Path(importlib.util.find_spec(name).origin).parent  # without importing it
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@cache  # both cipher corpora and their pieces are made from it
def pydocs() -> Records:
    """A document is the prose in the docstrings of a source file. A hash of the file name chooses its split.

    A repeated paragraph is kept only where it first appears.
    """
    seen, rows = set(), []
    for name, paragraphs in progress(python_files(), "reading"):
        new = [text for text in dict.fromkeys(paragraphs) if text not in seen]
        seen.update(new)
        if new:
            rows.append((split_of(f"split/{name}", valid=0.045, test=0.045), "\n\n".join(new)))
    return rows


def python_files() -> Iterator[tuple[str, Iterator[str]]]:
    """(name, paragraphs of its documentation) of each source file in ROOTS."""
    files = {}
    for package, root in ROOTS.items():
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if SKIPPED.isdisjoint(relative.parts):
                files[f"{package}/{relative.as_posix()}"] = path
    for name, path in sorted(files.items()):
        texts = []
        # no text if the file does not parse; the last two errors mean that its code is nested too deeply
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings(action="ignore"):
            texts = list(documentation(ast.parse(path.read_bytes())))
        yield name, chain.from_iterable(map(sentences, texts))


ADD_DOC = re.compile(r"_?add_(docstr|newdoc)")  # how torch and numpy document compiled functions


def documentation(node: ast.AST) -> Iterator[str]:
    """Docstrings, strings passed to ADD_DOC, and those assigned to `__doc__` or to pydoc's `topics` (the manual)."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
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
        if isinstance(children, list):  # the body of a lambda is a single node
            for child in children:
                yield from documentation(child)


def name_of(node: ast.expr) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def literals(node: ast.expr) -> Iterator[str]:
    """The strings in an expression: also inside +, %, .format(...), tuples, lists and dictionary values."""
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


MARKUP = [  # (pattern, replacement)
    (re.compile(r":[\w:]+:`[~!]?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # :func:`~torch.abs`
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`_+"), r"\1"),  # `text <address>`_
    (re.compile(r"(``?|\*\*?)(?=\S)([^`*\n]*?\S)\1_*"), r"\2"),  # ``code``, `code`, **strong**, *emphasis*
    (re.compile(r"^(?:[-*+•]|\d+[.)]|\.\. note::|Notes?:|Warning:|Returns:|Yields:)\s+"), ""),
    (re.compile(r"::$"), ":"),
]
HEADER = re.compile(r"^[^\n]+\n\s*[-=~^\"*]{3,}[ \t]*$", re.MULTILINE)  # an underlined heading
PLAIN = re.compile(r"""["'“(]*[A-Za-z’'-]+[)"'”]*[.,;:!?]*[)"'”]*""")  # a plain word, maybe quoted or with punctuation


def sentences(text: str) -> Iterator[str]:
    """The paragraphs that are prose, each on one line, without markup: no doctests, formulas, tables and so on."""
    for block in re.split(r"\n[ \t]*\n", HEADER.sub("\n", text)):
        block = " ".join(block.split())
        for pattern, replacement in MARKUP:
            block = pattern.sub(replacement, block)
        words = block.split()
        if len(words) < 5 or not block[0].isupper() or block[-1] not in ".!?:":
            continue
        if re.match(r"\w+ ?:", block) or " : " in block:  # Args: ..., or x : array_like
            continue
        if len(list(filter(PLAIN.fullmatch, words))) >= 0.8 * len(words):
            yield block
