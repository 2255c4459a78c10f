"""Numbers, times and reasons as people read them in a table."""

from __future__ import annotations

import math
from collections import Counter

from forge.errors import Reason

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def ago(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h`, `5 d`: the largest unit that fits."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def clock(seconds: float | None) -> str:
    """Seconds as `1:02:03`; empty if unknown."""
    if seconds is None or not 0 <= seconds < 1e8:
        return ""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def per_second(rate: float | None) -> str:
    """A rate as `12.3/s`; empty if unknown."""
    if rate is None or not 0 < rate < math.inf:
        return ""
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:.0f}/s"


def number(value: float | None) -> str:
    """A logged value with four digits; empty if there is none."""
    return "" if value is None else f"{value:.4g}"


def count(number: int, noun: str) -> str:
    """`1 job`, `3 jobs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def reason(name: str) -> str:
    """The name of a reason, for people: `time limit` for `time_limit`."""
    return name.replace("_", " ") if name in Reason.__members__ else name


def reasons(ends: Counter[str]) -> str:
    """`2 preempted, 1 hung`, the most frequent first."""
    return ", ".join(f"{n} {reason(name) or 'unknown'}" for name, n in ends.most_common())
