"""Facts about a script's variable, from its source: the line of its first assignment, and whether
each step assigns it before reading it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

_LOOPS = ("steps", "epochs", "batches")
"""Methods of a `forge.Run` that a loop is over."""


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


def is_renewed(file: str, name: str) -> bool:
    """Whether each step assigns the variable before it is read, so that it need not be saved."""
    tree = _tree(file)
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For) and _is_ours(one)]
    if not loops or any(name in _loaded(one) for one in _functions(tree, loops)):
        return False
    return all(_first_use(one, name) == "store" for one in loops)


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _is_ours(loop: ast.For) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in _LOOPS for one in ast.walk(loop.iter))


def _functions(tree: ast.AST, loops: list[ast.For]) -> Iterator[ast.AST]:
    """The functions that contain no loop: when called, they can read a variable of the loop."""
    for one in ast.walk(tree):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = set(ast.walk(one))
            if not any(loop in inside for loop in loops):
                yield one


def _loaded(node: ast.AST) -> set[str]:
    """Names that are read in a function and not its own."""
    own = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    shared = {
        name
        for one in ast.walk(node)
        if isinstance(one, ast.Nonlocal | ast.Global)
        for name in one.names
    }
    own |= {name for one in ast.walk(node) if (name := _stored(one))} - shared
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
    return {one.id for one in names if isinstance(one.ctx, ast.Load)} - own


def _stored(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return None


def _first_use(node: ast.AST, name: str) -> str:
    """`load` if it can be read first, `store` if it is always assigned first; else nothing."""
    if isinstance(node, ast.Name) and node.id == name:
        return "store" if isinstance(node.ctx, ast.Store) else "load"
    if isinstance(node, ast.AugAssign):
        target = node.target
        is_read = isinstance(target, ast.Name) and target.id == name
        return "load" if is_read else _first_of([node.value, target], name)
    if isinstance(node, ast.Assign):
        return _first_of([node.value, *node.targets], name)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return _first_use(node.test, name) or _branches(node, name)
    if isinstance(node, ast.For):
        if _is_ours(node):
            return _first_of([node.target, *node.body], name)
        # Perhaps it has nothing to go over.
        found = _first_use(node.iter, name)
        return found or _only_load(_first_of([node.target, *node.body], name))
    if isinstance(node, ast.Try):
        several = [node.body, *(one.body for one in node.handlers)]
        return _together([_first_of(one, name) for one in several])
    return _first_of(list(ast.iter_child_nodes(node)), name)


def _branches(node: ast.If | ast.IfExp | ast.While, name: str) -> str:
    parts = [one if isinstance(one, list) else [one] for one in (node.body, node.orelse)]
    found = [_first_of(one, name) for one in parts]
    return _only_load(_together(found)) if isinstance(node, ast.While) else _together(found)


def _together(found: list[str]) -> str:
    """Of ways of which one is taken."""
    return "load" if "load" in found else "store" if set(found) == {"store"} else ""


def _only_load(found: str) -> str:
    return found if found == "load" else ""


def _first_of(nodes: Sequence[ast.AST], name: str) -> str:
    return next((found for one in nodes if (found := _first_use(one, name))), "")
