"""What a generator of forge's returns that waits between its steps, as a supervisor drives it."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

_Value = TypeVar("_Value")


def returned(work: Generator[None, None, _Value]) -> _Value:
    """Drive it to its end, with a moment between two steps as between two ticks."""
    try:
        while True:
            next(work)
            time.sleep(0.02)
    except StopIteration as end:
        value: _Value = end.value
        return value
