"""The documentation inside Python files, read with `ast`: nothing is imported and nothing is run."""

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

MIN_LENGTH = 20  # characters; shorter docstrings say little
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Calls that attach documentation to compiled functions: torch's add_docstr(torch.abs, "..."), numpy's add_newdoc(...).
ADD_DOC = re.compile(r"_?add_(docstr|newdoc)")


def docstrings(path: Path | str) -> list[str]:
    """Cleaned docstrings of one file in source order; none if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [text for text in _walk(tree) if len(text) >= MIN_LENGTH]


def _walk(node: ast.AST) -> Iterator[str]:
    if isinstance(node, DEFINITIONS):
        yield ast.get_docstring(node) or ""
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        if node.targets[0].attr == "__doc__":
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
    """The string literals of an argument, seen through +, %, .format(...), tuples and lists."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "".join([*_literals(left), *_literals(right)])
        case ast.BinOp(left=left, op=ast.Mod()):
            yield from _literals(left)
        case ast.Call(func=ast.Attribute(value=text)):
            yield from _literals(text)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from _literals(element)
