"""Names the values of a trainer's callback that a resume would lose."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float)
_CONTAINERS = (list, dict, set, torch.Tensor, torch.nn.Module)


def lost_on_resume(callback: Any) -> str | None:
    """A sentence on the values of a callback without a state that training can change.

    Options that only the constructor sets are left out: a resumed job sets them again.
    """
    changing = assigned(callback)
    names = [
        name
        for name, value in vars(callback).items()
        if isinstance(value, _CONTAINERS) or (isinstance(value, _PLAIN) and name in changing)
    ]
    if not names:
        return None
    return (
        f"the callback {type(callback).__name__} has no state_dict, so {', '.join(names)} would be"
        " as at the start after a resume. If training changes them, give the callback state_dict"
        " and load_state_dict"
    )


def assigned(value: Any) -> frozenset[str]:
    """The attributes that methods of an object assign, apart from its constructor."""
    kind: Any = type(value)
    return _assigned(kind)


@functools.cache
def _assigned(kind: type) -> frozenset[str]:
    return frozenset(_stored(kind))


def _stored(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        for name, value in vars(one).items():
            method = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(method) and name != "__init__":
                steps = dis.get_instructions(method)
                yield from (str(step.argval) for step in steps if step.opname == "STORE_ATTR")
