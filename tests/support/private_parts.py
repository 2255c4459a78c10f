"""Finds uses of names that are private to another module: `other._x`, `from m import _x`.

A name belongs to a module if the module defines it; a name after `self.`, also if a base class of
one of the module's classes does. Documented names that begin with an underscore are not private.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import repository
from repository import modules

DOCUMENTED = {"_exit", "_asdict", "_fields", "_make", "_replace", "_value_", "_typeshed"}
DOCUMENTED |= {"_target_", "_self_"}
"""Documented names of `os`, namedtuples, enums and typeshed, and keys of Hydra."""
_PRIVATE = re.compile(r"_[A-Za-z]\w*")


def private_parts(path: Path) -> list[str]:
    """`line: code` of each such use in a file."""
    module = repository.tree(path)
    of_module = _defined(module)
    of_self = of_module | _inherited(module)
    found = []
    for node in _nodes(module):
        private = [name for name in _named(node) if _is_private(name) and name not in of_module]
        if private and not (_is_self(node) and of_self.issuperset(private)):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@functools.cache
def _nodes(module: ast.Module) -> list[ast.AST]:
    """All of a module: the walk takes longer than what is looked for."""
    return list(ast.walk(module))


def _named(node: ast.AST) -> Iterator[str]:
    """The names that a node looks up in another object, as attributes or as texts."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value  # for getattr and vars(…): a text that consists of a name
    elif isinstance(node, ast.ImportFrom) and node.module not in modules():
        yield from [*str(node.module).split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.ImportFrom):
        yield from (a.name for a in node.names if f"{node.module}.{a.name}" not in modules())
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))


def _is_private(name: str) -> bool:
    is_dunder = name.startswith("__") and name.endswith("__")
    return bool(_PRIVATE.fullmatch(name)) and not is_dunder and name not in DOCUMENTED


def _is_self(node: ast.AST) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def _defined(tree: ast.Module) -> set[str]:
    found = set()
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if _is_self(node) else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _inherited(tree: ast.Module) -> set[str]:
    """Names defined in the modules of the base classes of this module's classes."""
    classes = [node for node in _nodes(tree) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base).partition("[")[0] for one in classes for base in one.bases}
    found = set()
    for node in _nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                name = alias.asname or alias.name
                if name in bases:
                    found |= _of_module(str(node.module))
                if any(base.startswith(f"{name}.") for base in bases):
                    found |= _of_module(f"{node.module}.{alias.name}")
    return found


@functools.cache
def _of_module(name: str) -> set[str]:
    module = repository.tree(modules()[name]) if name in modules() else ast.parse("")
    return _defined(module) | _inherited(module)
