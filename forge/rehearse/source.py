"""Where a script assigns a variable for the first time, from its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


def line_of(file: str, function: str, name: str) -> int | None:
    """Line of a variable's first assignment in a function, or in the file without a function."""
    tree = _tree(file)
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    within = [one for one in functions if one.name == function] if function else [tree]
    nodes = (one for place in within for one in _own(place) if _stored(one) == name)
    return min((getattr(one, "lineno", 0) for one in nodes), default=None)


def _own(place: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those inside its functions and classes."""
    for child in ast.iter_child_nodes(place):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _own(child)


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _stored(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return None
