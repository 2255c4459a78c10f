"""Values of the program's own classes that are kept by name: enums and namedtuples.

They come back only as classes that the program has imported already: reading a checkpoint imports
nothing and calls nothing of theirs but an enum's look-up.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from forge.errors import DamagedCheckpoint


@dataclass(frozen=True)
class NotImported:
    """Stands for a value of a class that this program has not imported, where one only looks."""

    name: str
    value: Any


_is_only_looked_at: ContextVar[bool] = ContextVar("is_only_looked_at", default=False)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Within, values of classes that are not imported are read as `NotImported`."""
    token = _is_only_looked_at.set(True)
    try:
        yield
    finally:
        _is_only_looked_at.reset(token)


def _find_class(module: str, qualname: str) -> Any:
    """What the program has under this name.

    Not by getattr: a module's or a class's own `__getattr__` may import, or do anything else.
    """
    if module == "__mp_main__" and module not in sys.modules:
        module = "__main__"  # the script, as a job of a sweep has it
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _is_namedtuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and type(kind.__dict__.get("_fields")) is tuple


def encode(value: Any, encode_one: Callable[[Any, str], Any]) -> dict[str, Any] | None:
    """JSON for an enum or a namedtuple whose class can be found again; None for all else.

    Args:
        encode_one: Gives JSON for a part of it, named by the second argument.
    """
    kind: Any = type(value)
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        return None
    name = [kind.__module__, kind.__qualname__]
    if isinstance(value, enum.Enum):
        if kind.__members__.get(value.name or "") is value:
            return {"!enum": name, "name": value.name}
        return {"!enum": name, "value": encode_one(value.value, "value")}
    if _is_namedtuple(kind):
        parts = zip(kind._fields, value, strict=False)
        return {"!namedtuple": name, "items": [encode_one(v, field) for field, v in parts]}
    return None


def decode_enum(encoded: dict[str, Any], decode_one: Callable[[Any], Any]) -> Any:
    """The enum's member.

    Raises:
        DamagedCheckpoint: Where the program has not imported its class.
    """
    found = _find_class(*encoded["!enum"])
    name = encoded.get("name")
    content = decode_one(encoded["value"]) if name is None else name
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        return _not_imported(encoded["!enum"], content, "enum")
    return found(content) if name is None else found[name]


def decode_namedtuple(encoded: dict[str, Any], decode_one: Callable[[Any], Any]) -> Any:
    """The namedtuple.

    Raises:
        DamagedCheckpoint: Where the program has not imported its class.
    """
    found = _find_class(*encoded["!namedtuple"])
    items = tuple(decode_one(item) for item in encoded["items"])
    if not (isinstance(found, type) and _is_namedtuple(found)):
        return _not_imported(encoded["!namedtuple"], items, "namedtuple")
    if len(found.__dict__["_fields"]) != len(items):
        raise ValueError(f"{len(items)} items for the fields of {found.__qualname__}")
    return tuple.__new__(found, items)  # its own `__new__` could do anything


def _not_imported(name: list[str], value: Any, what: str) -> NotImported:
    shown = ".".join(name)
    if not _is_only_looked_at.get():
        raise DamagedCheckpoint(f"{shown} is no {what} that this program has imported")
    return NotImported(shown, value)
