"""Private parts of the standard library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def interpreter_flags() -> list[str]:
    """The flags of this interpreter (-O, -W, -X, …), as multiprocessing passes them on.

    If it goes: see what `multiprocessing.popen_spawn_posix` calls now; else build them from
    `sys.flags`, `sys.warnoptions` and `sys._xoptions`.
    """
    import subprocess

    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


def resource_tracker_pid() -> int | None:
    """The pid of the process that removes leaked semaphores of multiprocessing, or None.

    If it goes: see where `multiprocessing.resource_tracker` stores its pid. Until then return
    None: a stop then ends the tracker as well, which warns of leaked semaphores.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None)


@contextmanager
def tracker_leaves_mask() -> Iterator[None]:
    """Keep INT and TERM blocked where multiprocessing starts that process (for `spawn`).

    It unblocks both afterwards, for whatever is started next, although they were blocked before.
    If it goes: see whether `ensure_running` of `multiprocessing.resource_tracker` puts the mask
    back that it found; then nothing has to be done.
    """
    from multiprocessing import resource_tracker

    resource_tracker._HAVE_SIGMASK = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        resource_tracker._HAVE_SIGMASK = True  # type: ignore[attr-defined]
