"""A key of the policy: its default, what it means and which values it takes, in one place.

    every_s: float | None = key(600.0, gt=0, help="Seconds between two saves. null: never.")

From this the preset `default` and the reference page are generated, and values are checked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

_NAME = "forge"


@dataclass(frozen=True, kw_only=True)
class Key:
    """What is known of a key beside its type and its default."""

    help: str
    """Its meaning; the preset shows the first sentence."""
    gt: float | None = None
    """Its value has to be above this, and finite."""
    ge: float | None = None
    """Its value has to be this at least, and finite."""
    choices: tuple[str, ...] = ()
    """The words that it can be; for an enum its type says so."""
    remedy: str = ""
    """What to do about a value that is out of bounds, or a text that is empty."""
    is_filled: bool = False
    """Whether a text must not be empty."""
    is_path: bool = False
    """Whether it is the path of a file or directory."""


def key(
    default: Any,
    *,
    help: str,
    gt: float | None = None,
    ge: float | None = None,
    choices: tuple[str, ...] = (),
    remedy: str = "",
    is_filled: bool = False,
    is_path: bool = False,
) -> Any:
    """A field of a dataclass of the policy: `dataclasses.field` with a `Key`."""
    known = Key(
        help=help,
        gt=gt,
        ge=ge,
        choices=choices,
        remedy=remedy,
        is_filled=is_filled,
        is_path=is_path,
    )
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata={_NAME: known})
    return field(default=default, metadata={_NAME: known})


def walk(group: Any, prefix: str = "") -> Iterator[tuple[str, Any, Key]]:
    """(dotted key, value, what is known of it) of every key of a policy, or of a part of one.

    The keys of dataclasses in a list or mapping follow the list's or mapping's own.
    """
    for one in fields(group):
        name, value, known = f"{prefix}{one.name}", getattr(group, one.name), one.metadata
        if _NAME in known:
            yield name, value, known[_NAME]
        for inner, place in _dataclasses(name, value):
            yield from walk(inner, f"{place}.")


def _dataclasses(name: str, value: Any) -> Iterator[tuple[Any, str]]:
    if is_dataclass(value):
        yield value, name
    elif isinstance(value, Mapping):
        yield from ((one, f"{name}.{at}") for at, one in value.items() if is_dataclass(one))
    elif isinstance(value, list):
        yield from ((one, f"{name}[{at}]") for at, one in enumerate(value) if is_dataclass(one))
