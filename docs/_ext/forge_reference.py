"""What the reference says of keys and exit codes, read from the code itself.

The directive `{forge-reference} policy` (or `exit-codes`, or `cli`) puts it into a page. Each part
is a plain function that returns Markdown, so that tests can read it without building the site.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from forge import errors
from forge.config import schema


def field_docs(module: ModuleType) -> dict[str, dict[str, str]]:
    """Class -> name -> the string under that field or enum member."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            members = found.setdefault(node.name, {})
            for one, below in zip(node.body, [*node.body[1:], None], strict=True):
                name = _assigned(one)
                is_documented = isinstance(below, ast.Expr) and isinstance(
                    below.value, ast.Constant
                )
                if name and is_documented:
                    members[name] = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
    return found


def _assigned(node: ast.stmt) -> str:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return targets[0].id if targets and isinstance(targets[0], ast.Name) else ""


def policy_keys() -> Iterator[tuple[str, str, Any, str]]:
    """(key, type, default, meaning) of every key under `resilience`."""
    docs = field_docs(schema)

    def walk(instance: Any, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
        cls = type(instance)
        hints = typing.get_type_hints(cls)
        for field in fields(cls):
            if is_dataclass(hints[field.name]):
                yield from walk(getattr(instance, field.name), f"{prefix}{field.name}.")
            else:
                default = _plain(getattr(instance, field.name))
                meaning = docs[cls.__name__].get(field.name, "")
                yield f"{prefix}{field.name}", _type(hints[field.name]), default, meaning

    yield from walk(schema.Policy(), "")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _type(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{name}`" for name in hint.__members__)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return f"list of {_type(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return f"{_type(arguments[0])}: {_type(arguments[1])}"
    if arguments:  # X | None
        return " or ".join(_type(one) for one in arguments)
    names = {"NoneType": "null", "str": "text", "RequeueRule": "rule"}
    return names.get(hint.__name__, hint.__name__)


def _yaml(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return json.dumps(value)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def policy() -> str:
    """Every key under `resilience`, as a table."""
    rows = [
        [f"`{key}`", f"`{_yaml(default)}`", kind, meaning.replace("|", "\\|")]
        for key, kind, default, meaning in policy_keys()
    ]
    return _table(["key under `resilience`", "default", "type", "meaning"], rows)


def exit_codes() -> str:
    """Every code that a forge process ends with, as a table."""
    docs = field_docs(errors)["ExitCode"]
    rows = [[str(int(code)), f"`{code.name}`", docs[code.name]] for code in errors.ExitCode]
    return _table(["exit code", "name", "meaning"], rows)


def cli() -> str:
    """What the command `forge` says of itself, and then each of its commands."""
    said = _help()
    names = re.findall(r"^    (\w+)  ", said, re.MULTILINE)
    shown = {"forge": said} | {f"forge {name}": _help(name) for name in names}
    return "\n".join(f"```text\n$ {name} --help\n{text}```\n" for name, text in shown.items())


def _help(*command: str) -> str:
    words = [sys.executable, "-m", "forge", *command, "--help"]
    env = {**os.environ, "COLUMNS": "90"}
    return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout


PARTS = {"policy": policy, "exit-codes": exit_codes, "cli": cli}


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    from sphinx.util.docutils import SphinxDirective

    class Reference(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[Any]:
            return self.parse_text_to_nodes(PARTS[self.arguments[0]]())

    app.add_directive("forge-reference", Reference)
    return {"parallel_read_safe": True}
