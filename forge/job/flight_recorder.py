"""NCCL's flight recorder: what it has recorded of the last collectives, asked for when ranks hang.

torch makes a named pipe for each rank; whoever writes to it has the record written to a file. Not
yet seen on a device. Source: torch's ProcessGroupNCCL (DumpPipe) and FlightRecorder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path

from forge.process.stacks import settled

_BUFFER = "TORCH_FR_BUFFER_SIZE"
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILE = "TORCH_FR_DUMP_TEMP_FILE"
_RECORDS = "2000"  # torch's own default, which its pipe does not take for granted
_WRITES_S = 5.0
"""Seconds until the file is there: torch looks at its pipe once a second."""


def environ(forge: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Variables of a rank that make torch listen; none where the user has set them otherwise.

    Args:
        forge: The job's `.forge`.
        given: The environment that the rank has already.
    """
    if _PIPE in given or not _has_pipes(forge):
        return {}
    files = {_PIPE: str(forge / "nccl_"), _FILE: str(forge / "nccl_trace_")}
    wanted = {_BUFFER: _RECORDS, **files}
    return {name: value for name, value in wanted.items() if name not in given}


def _has_pipes(folder: Path) -> bool:
    """Whether the file system has named pipes: without, torch would not make its process group."""
    path = folder / f".nccl-{os.getpid()}.pipe"
    try:
        os.mkfifo(path, 0o600)
        path.unlink()
    except (OSError, AttributeError):
        return False
    return True


def collect(given: Mapping[str, str], rank: int, to: Path) -> Generator[None, None, bool]:
    """Ask a rank for its record, and copy it; yields while it is being written.

    Args:
        given: The rank's environment.
        rank: Its number.
        to: The file that it becomes.
    Returns:
        Whether there was one.
    """
    pipe, file = Path(f"{given.get(_PIPE, '')}{rank}.pipe"), Path(f"{given.get(_FILE, '')}{rank}")
    if _PIPE not in given or _FILE not in given:
        return False
    with contextlib.suppress(OSError):
        file.unlink()  # of an earlier time
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no NCCL here, or its thread is gone: nobody reads
        return False
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)
    if not (yield from settled(file, 0, _WRITES_S, _WRITES_S)):
        return False
    shutil.copyfile(file, to)
    return True
