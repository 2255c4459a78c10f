"""A key of the policy: its default, its meaning and its allowed values, in one place.

    every_s: float | None = key(600.0, gt=0, help="Seconds between two saves. null: never.")

Values are checked against these, and the preset `default` and the reference page generated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

_NAME = "forge"


@dataclass(frozen=True, kw_only=True)
class Key:
    """The properties of a key apart from its type and default."""

    help: str
    """Its meaning; the preset shows the first sentence."""
    gt: float | None = None
    """The value must be larger than this, and finite."""
    ge: float | None = None
    """The value must be at least this, and finite."""
    choices: tuple[str, ...] = ()
    """The allowed words; for an enum they follow from its type."""
    remedy: str = ""
    """What to do if a value is out of bounds, or a string is empty."""
    is_filled: bool = False
    """Whether a string must not be empty."""
    is_path: bool = False
    """Whether it is the path of a file or directory."""


def key(default: Any, **properties: Any) -> Any:
    """A field of a dataclass of the policy: `dataclasses.field` with a `Key`.

    Args:
        default: The default.
        properties: Those of `Key`.
    """
    known = Key(**properties)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata={_NAME: known})
    return field(default=default, metadata={_NAME: known})


def walk(group: Any, prefix: str = "") -> Iterator[tuple[str, Any, Key]]:
    """(dotted key, value, properties) of every key of a policy or of a part of one.

    The keys of dataclasses in a list or mapping follow the key of the list or mapping.
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
