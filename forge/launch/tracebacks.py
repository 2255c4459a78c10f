"""A job's exception as Hydra prints it: only with frames of the user's code.

A traceback cannot be pickled. The job's process sends its frames to the launcher as texts, and the
launcher rebuilds them, so that Hydra prints the same as for a job that it runs itself.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import hydra
import omegaconf

Frames = list[tuple[str, str, int]]
"""File, function and line of each frame, the outermost first."""

_FORGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (_FORGE, *(os.path.dirname(one.__file__ or "") for one in (hydra, omegaconf)))
)


def shorten(error: BaseException) -> Frames:
    """Remove the frames below the user's code; Hydra itself removes the frames above it.

    With HYDRA_FULL_ERROR=1 all frames are kept.
    """
    entries = list(_entries(error.__traceback__))
    if os.environ.get("HYDRA_FULL_ERROR") != "1":
        own = [n for n, one in enumerate(entries) if not _is_library(one)]
        if own:
            entries[own[-1]].tb_next = None
            entries = entries[: own[-1] + 1]
    return [
        (one.tb_frame.f_code.co_filename, one.tb_frame.f_code.co_name, one.tb_lineno)
        for one in entries
    ]


def shown(error: BaseException) -> str:
    """The text of a shortened exception, also without the frames above the user's code."""
    entries = list(_entries(error.__traceback__))
    first = entries[0] if entries else None
    if os.environ.get("HYDRA_FULL_ERROR") != "1":
        first = next((one for one in entries if not _is_library(one)), first)
    return "".join(traceback.format_exception(type(error), error, first))


def origin(error: BaseException) -> str:
    """The text of the exception's cause or context; empty if there is neither."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(traceback.format_exception(before)) if before is not None else ""


def made_again(frames: Frames) -> TracebackType | None:
    """A traceback with these frames."""
    found: TracebackType | None = None
    for file, function, line in reversed(frames):
        code = compile("import sys; frame = sys._getframe()", file, "exec")
        space: dict[str, Any] = {}
        exec(code.replace(co_name=function), space)
        found = TracebackType(found, space["frame"], -1, line)
    return found


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_library(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_LIBRARIES)
