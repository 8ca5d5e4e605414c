"""The prose of the documentation inside Python files, read with `ast`: nothing is imported and nothing is run."""

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

MIN_WORDS = 5  # of a paragraph; shorter ones say little
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Calls that attach documentation to compiled functions: torch's add_docstr(torch.abs, "..."), numpy's add_newdoc(...).
ADD_DOC = re.compile(r"_?add_(docstr|newdoc)")


def paragraphs(path: Path | str) -> list[str]:
    """The paragraphs of prose in one file's docstrings, in source order; none if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            texts = list(_walk(ast.parse(Path(path).read_bytes())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: of what is nested too deeply
        return []
    found = []
    for text in texts:
        found += prose(text)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# where documentation stands


def _walk(node: ast.AST) -> Iterator[str]:
    if isinstance(node, DEFINITIONS):
        yield ast.get_docstring(node) or ""
    elif isinstance(node, ast.Assign):
        named = getattr(node.targets[0], "attr", None) or getattr(node.targets[0], "id", None)
        if named in ("__doc__", "topics"):  # torch's compiled functions; the manual that is in pydoc_data
            yield from map(inspect.cleandoc, _literals(node.value))
    elif isinstance(node, ast.Call) and ADD_DOC.match(_name(node.func)):
        for argument in node.args:
            yield from map(inspect.cleandoc, _literals(argument))
    for child in _documented(node):
        yield from _walk(child)


def _documented(node: ast.AST) -> Iterator[ast.AST]:
    """The children that can hold documentation: statements, and calls that are a statement or an assigned value."""
    if isinstance(node, ast.Expr | ast.Assign):
        yield node.value
    for field in ("decorator_list", "body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(node, field, ())
        yield from children if isinstance(children, list) else ()


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")


def _literals(node: ast.expr) -> Iterator[str]:
    """The string literals of an argument, seen through +, %, .format(...), tuples, lists and values of dictionaries."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "".join([*_literals(left), *_literals(right)])
        case ast.BinOp(left=left, op=ast.Mod()):
            yield from _literals(left)
        case ast.Call(func=ast.Attribute(value=text)):
            yield from _literals(text)
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Dict(values=elements):
            for element in elements:
                yield from _literals(element)


# ---------------------------------------------------------------------------------------------------------------------
# which of it is prose

MARKUP = [  # what marks words up, and what is left of it
    (re.compile(r":[\w:]+:`[~!]?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # :func:`~torch.abs`
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`_+"), r"\1"),  # `text <address>`_
    (re.compile(r"(``?|\*\*?)(?=\S)([^`*\n]*?\S)\1_*"), r"\2"),  # ``code``, `code`, **strong**, *emphasis*
    (re.compile(r"^(?:[-*+•]|\d+[.)]|\.\. note::|Notes?:|Warning:|Returns:|Yields:)\s+"), ""),
    (re.compile(r"::$"), ":"),
]
HEADER = re.compile(r"^[^\n]+\n\s*[-=~^\"*]{3,}[ \t]*$", re.MULTILINE)  # a line that is underlined
PLAIN = re.compile(r"""["'“(]*[A-Za-z’'-]+[)"'”]*[.,;:!?]*[)"'”]*""")  # a word of a sentence


def prose(text: str) -> Iterator[str]:
    """The paragraphs that are sentences, each in one line, without markup.

    A sentence begins with a capital and ends in a mark; four in five of its words are nothing but letters. So doctests,
    signatures, formulas, tables and lists of parameters are left out.
    """
    for block in re.split(r"\n[ \t]*\n", HEADER.sub("\n", text)):
        block = " ".join(block.split())
        for pattern, kept in MARKUP:
            block = pattern.sub(kept, block)
        words = block.split()
        if len(words) < MIN_WORDS or not block[0].isupper() or block[-1] not in ".!?:":
            continue
        if re.match(r"\w+ ?:", block) or " : " in block:  # Args: ..., x : array_like
            continue
        plain = sum(1 for word in words if PLAIN.fullmatch(word))
        if plain >= 0.8 * len(words):
            yield block
