"""Keeps the value that was first seen of an object, for as long as the object lives.

Objects are compared by identity: a tensor given as a loader compares with `==` element by element.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_Seen = TypeVar("_Seen")


class FirstSeen(Generic[_Seen]):
    """One value for each object."""

    def __init__(self) -> None:
        self._by_id: dict[int, _Seen] = {}

    def of(self, one: Any, now: _Seen) -> _Seen:
        """The first value that was passed for an object.

        Args:
            one: The object.
            now: The value to keep if this is the first call for the object.
        Raises:
            TypeError: If the object cannot be weakly referenced, for example a list.
        """
        if id(one) not in self._by_id:
            weakref.finalize(one, self._by_id.pop, id(one), None).atexit = False
            self._by_id[id(one)] = now
        return self._by_id[id(one)]
