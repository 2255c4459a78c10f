"""Private parts of the standard library."""

from __future__ import annotations

import argparse
import sys


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


def options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command, sorted, such as `--help` and `-h`.

    If it goes: return an empty list; then shells complete only the commands of forge.
    """
    return sorted(parser._option_string_actions)
