"""Private parts of the standard library, and of NumPy's global generator."""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from typing import Any


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


_MT19937_BYTES = 624 * 4 + 4
"""The words and the position."""


def python_memory() -> tuple[Any, ...]:
    """A value that changes if python's global generator draws, is seeded or is restored.

    If it goes: return `random.getstate()`.
    """
    generator: Any = getattr(random.getstate, "__self__", None)
    if generator is None:  # somebody has replaced it
        return (object(),)
    return object_memory(generator), generator.gauss_next


def numpy_memory(numpy: Any) -> tuple[Any, ...]:
    """The same for numpy's global generator, if that is an MT19937.

    Args:
        numpy: The module.

    If it goes: return a new `object()` in a tuple, which is equal to nothing.
    """
    generator = getattr(numpy.random.get_state, "__self__", None)
    bits: Any = getattr(generator, "_bit_generator", None)
    if type(bits) is not numpy.random.MT19937:
        return (object(),)
    return object_memory(generator), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def object_memory(one: object) -> bytes:
    """The bytes of a python object, without its head, which has the number of references.

    If it goes: see the functions above, and read the states each time.
    """
    head = object.__basicsize__
    return ctypes.string_at(id(one) + head, type(one).__basicsize__ - head)
