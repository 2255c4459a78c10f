"""The output of a job: its file, a part of it, and its end."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forge.filesystem.files import open_file
from forge.jobdir.job_files import OUTPUT, suffix

TAIL_BYTES = 1 << 16
_ERROR = re.compile(
    r"^\[[^\]]*\]\[forge\]\[ERROR\] - (.+(?:\n(?!\[|forge: ).*){0,4})", re.MULTILINE
)
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)$')
_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages|lib[/\\]python[\d.]+)[/\\]|[/\\]forge[/\\]\w+[/\\]"
)


def path_of(directory: Path, rank: int = 0) -> Path:
    """The file with the output of a rank."""
    return directory / f"{OUTPUT}{suffix(rank)}"


def end_of(directory: Path, rank: int = 0, size: int = TAIL_BYTES) -> str:
    """The end of a rank's output; empty if there is none."""
    try:
        with os.fdopen(open_file(path_of(directory, rank)), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - size, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_frame(text: str) -> str:
    """`train.py:23 in main`: where the last traceback in a text was raised, in the user's code.

    A frame of a library counts only if there is no other; empty without a traceback.
    """
    _, head, trace = text.rpartition("Traceback (most recent call last):")
    if not head:
        return ""
    found = [match.groups() for match in map(_FRAME.match, trace.splitlines()) if match]
    own = [one for one in found if not _LIBRARY.search(one[0])]
    if not found:
        return ""
    file, line, function = (own or found)[-1]
    return f"{file}:{line} in {function}"


def last_error(text: str) -> str:
    """The last error that forge logged, at most five lines; empty without one."""
    found = _ERROR.findall(text)
    return found[-1].strip() if found else ""
