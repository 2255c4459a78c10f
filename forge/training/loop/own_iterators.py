"""Iterators over a DataLoader that the script itself reads in its loop.

No checkpoint has their place in the data. A script that calls `next(iterator)` in each step would
begin with the first batch again after a resume, without an error.
"""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

from forge import messages
from forge.compat import of_torch

_LOOKS = 3
"""Steps after each of which forge looks."""
_FRAMES = 4
"""Callers that are searched: a progress bar can be between the loop and forge."""
_DEPTH = 3
"""Iterators inside one another: `enumerate(itertools.cycle(loader))`."""
_DATALOADER = "torch.utils.data.dataloader"  # a loader with a state_dict has iterators of its own


class OwnIterators:
    """Finds the iterators that were read between two looks, each after a step."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._num_looks = 0

    def look(self, loop: Any) -> bool:
        """Warn if iterators have yielded batches since the last call; whether to look again.

        Args:
            loop: The iterator of `run.steps` or `run.batches`; None if it has ended.
        """
        self._num_looks += 1
        names = self._read(loop)
        if names:
            messages.warn(
                f"A resume could be inexact here: the loop reads a DataLoader by"
                f" `{'`, `'.join(names)}`, whose place in the data is not saved. Give the loader to"
                " the loop, `for step, batch in run.steps(n, loader):`; or, if the loop has one"
                " already, read this one with `second = run.loader(loader)` and `next(second)`."
            )
        return not names and self._num_looks < _LOOKS

    def _read(self, loop: Any) -> list[str]:
        """Names of the variables whose iterators have yielded batches since the last call."""
        before, self._seen = self._seen, weakref.WeakKeyDictionary()
        found: dict[str, None] = {}
        for name, iterator in _variables(inspect.currentframe(), loop):
            count = self._seen[iterator] = of_torch.num_yielded(iterator)
            if before.get(iterator, count) != count:
                found[name] = None
        return [*found]


def _variables(frame: types.FrameType | None, loop: Any) -> Iterator[tuple[str, Any]]:
    """The iterators over a DataLoader in the variables of the callers, and of their `self`."""
    num_left = _FRAMES
    while frame is not None and num_left:
        if not _is_ours(frame):
            # On no variable: `for step, batch in zip(run.steps(n), loader)`.
            if loop is not None and "zip" in frame.f_code.co_names:
                together = [one for one in gc.get_referrers(loop) if type(one) is tuple]
                yield from (("zip(…)", one) for each in together for one in _parts(each, _DEPTH))
            local = locals_of(frame)
            own = getattr(local.get("self"), "__dict__", {})
            of_self = {f"self.{name}": value for name, value in own.items()}
            for name, value in {**frame.f_globals, **local, **of_self}.items():
                yield from ((name, one) for one in _inside(value, _DEPTH))
            num_left -= 1
        frame = frame.f_back


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """The local variables of a frame, which does not keep them alive afterwards."""
    snapshot = frame.f_locals
    found = dict(snapshot)
    if type(snapshot) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        snapshot.clear()  # before Python 3.13 the frame keeps it, and would keep deleted variables
    return found


def _inside(one: Any, depth: int) -> Iterator[Any]:
    if type(one).__module__ == _DATALOADER and of_torch.num_yielded(one) is not None:
        yield one
    elif depth and hasattr(type(one), "__next__") and not _is_ours(getattr(one, "gi_frame", None)):
        for part in gc.get_referents(one):
            yield from _parts(part if type(part) is tuple else (part,), depth - 1)


def _parts(several: tuple[Any, ...], depth: int) -> Iterator[Any]:
    for one in several:
        yield from _inside(one, depth)


def _is_ours(frame: types.FrameType | None) -> bool:
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0] == "forge"
