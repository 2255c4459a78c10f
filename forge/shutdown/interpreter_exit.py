"""The end of the interpreter after a stop or a job: quick, and open files are written."""

from __future__ import annotations

import gc
import io
from typing import Any

from forge import messages

_IO_BASE: type = io.IOBase.__mro__[1]
"""What all files derive from, in C: to ask for it runs no code of the objects asked."""


def fast_exit() -> None:
    """Leave objects in cycles as they are; whatever files they hold is written all the same.

    To take torch's objects down one by one is most of a second. But a file that somebody left
    open, in a trainer that refers to its callbacks and they to it, is written to its end only when
    the collector gets there: so all are flushed here, and compressed ones closed, which have a last
    word of their own. Call it in a handler of atexit, the later the better.
    """
    gc.unfreeze()  # what was there before a job began would be passed over
    files = [one for one in gc.get_objects() if issubclass(type(one), _IO_BASE)]
    for file in sorted(files, key=_order):
        try:
            _write_out(file)
        except (io.UnsupportedOperation, BrokenPipeError):
            continue  # in memory; nobody reads it
        except OSError as error:
            messages.warn(f"The rest of an open file could not be written at exit: {error}")
        except Exception:  # noqa: BLE001 - half made, or of a class that has its own way
            continue
    gc.freeze()


def _write_out(file: Any) -> None:
    if file.closed or not file.writable() or file.fileno() <= 2:
        return
    if _order(file) == 1:
        file.close()
    else:
        file.flush()


def _order(file: Any) -> int:
    """What writes into another file comes before it: text, what compresses, bytes."""
    if isinstance(file, io.TextIOBase):
        return 0
    return 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.RawIOBase) else 1
