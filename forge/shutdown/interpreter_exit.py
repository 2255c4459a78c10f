"""The end of the interpreter after a stop or a job: quick, and no word of an open file lost."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from itertools import compress, repeat
from typing import Any

_IO_BASE: type = io.IOBase.__mro__[1]
"""What all files derive from, in C: to ask for it runs no code of the objects asked."""


def hurry() -> None:
    """Leave objects in cycles as they are; whatever files they hold is written all the same.

    To take torch's objects down one by one is most of a second. But a file that somebody left
    open, in a trainer that refers to its callbacks and they to it, is written to its end only when
    the collector gets there. So all open files are flushed now, and closed after every handler of
    atexit (a gzip file has a last word). Call it in one of these, the later the better; once is
    enough.
    """
    if isinstance(getattr(sys, "__interactivehook__", None), _Closing):
        return
    files = sorted(_open_files(), key=_order)
    for file in files:
        with contextlib.suppress(Exception):  # whoever wrote its class; closing it tells
            file.flush()
    # Of all there is, the interpreter lets go of this first: before modules, after atexit.
    setattr(sys, "__interactivehook__", _Closing(files))  # noqa: B010
    gc.freeze()


class _Closing:
    """Closes files when it is let go of; the last error is shown as one of a destructor is."""

    def __init__(self, files: list[Any]) -> None:
        self._files = files

    def __del__(self) -> None:
        failure: BaseException | None = None
        for file in self._files:
            try:
                file.close()
            except Exception as error:  # noqa: BLE001 - the next file is closed all the same
                failure = error
        if failure is not None:
            raise failure


def _open_files() -> list[Any]:
    """Every file of the system that is open for writing, but the standard streams."""
    gc.unfreeze()  # what was there before a job began would be passed over
    objects = gc.get_objects()  # some hundred thousand: no loop of Python over each
    are_files = map(issubclass, map(type, objects), repeat(_IO_BASE))
    found = []
    for file in compress(objects, are_files):
        with contextlib.suppress(Exception):  # closed, in memory, half made
            if file.fileno() > 2 and file.writable():
                found.append(file)
    return found


def _order(file: Any) -> int:
    """What writes into another file comes before it."""
    if isinstance(file, io.TextIOBase):
        return 0
    return 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.RawIOBase) else 1
