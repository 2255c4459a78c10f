"""Makes the interpreter exit quickly after a stop or a job, with all open files written."""

from __future__ import annotations

import gc
import io
from typing import Any

from forge import messages

_IO_BASE: type = io.IOBase.__mro__[1]
"""The C base class of all files: a check for it runs no code of the checked objects."""


def fast_exit() -> None:
    """Skip the collection of reference cycles at exit, but write the open files in them.

    To destroy torch's objects one by one takes most of a second. But without it, an open file in a
    cycle, such as a trainer that refers to its callbacks and they to it, would not be written
    completely. So this flushes all files, and closes compressed ones, which write a trailer. Call
    it in an atexit handler, the later the better.
    """
    gc.unfreeze()  # else objects from before the job would be skipped
    files = [one for one in gc.get_objects() if issubclass(type(one), _IO_BASE)]
    for file in sorted(files, key=_order):
        try:
            _write_out(file)
        except (io.UnsupportedOperation, BrokenPipeError):
            continue  # in memory only
        except OSError as error:
            messages.warn(
                f"At exit, an open file of your script was not written completely: {error}"
            )
        except Exception:  # noqa: BLE001 - half made, or an unusual class
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
    """A file that writes into another comes first: text, then compressed files, then bytes."""
    if isinstance(file, io.TextIOBase):
        return 0
    return 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.RawIOBase) else 1
