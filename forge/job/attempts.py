"""The attempts of a job: their numbers, and the output of each attempt of a command.

<job dir>/output.log             the whole output, with a mark at the start of each attempt
<job dir>/attempts/<n>.log       the output of attempt n, once it has ended; `<n>.log.1` of rank 1
<job dir>/.forge/logs.json       the position in the output at which the last attempt begins

The command writes directly into output.log, so forge cannot slow it down. On a full disk the marks
and the files of the attempts are missing, and the job continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from forge.filesystem.files import make_directory, open_file, read_if_there, write_all
from forge.jobdir.job_files import OUTPUT, forge_dir, job_ledger, read_json, suffix, write_json

_PLACE = "logs.json"
_CHUNK = 2**20


def last_number(directory: Path) -> int:
    """The number of the last attempt, over all starts of the job; 0 before the first."""
    lines = read_if_there(job_ledger(directory)).splitlines()
    return sum('"kind": "attempt"' in line for line in lines)


def mark_start(directory: Path, ranks: int, number: int) -> None:
    """Mark the start of an attempt in each rank's output, unless that is done already."""
    with _told():
        _mark_start(directory, ranks, number)


def keep_output(directory: Path) -> None:
    """Copy the output of the last attempt into files of its own."""
    with _told():
        _keep_output(directory)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"forge: cannot write a separate log for each attempt: {error}\n".encode())


def _mark_start(directory: Path, ranks: int, number: int) -> None:
    before = read_json(forge_dir(directory) / _PLACE)
    if before is not None and before["attempt"] == number:
        return
    _keep_output(directory)
    files = [_output(directory, rank) for rank in range(ranks)]
    try:
        begins = [os.fstat(fd).st_size for fd in files]
        write_json(forge_dir(directory) / _PLACE, {"attempt": number, "begins": begins})
        for fd, size in zip(files, begins, strict=True):
            is_new_line = size == 0 or os.pread(fd, 1, size - 1) == b"\n"
            at = time.strftime("%Y-%m-%d %H:%M:%S")
            mark = f"==== forge: attempt {number}, {at} ====\n"
            write_all(fd, ("" if is_new_line else "\n").encode() + mark.encode())
    finally:
        for fd in files:
            os.close(fd)


def _keep_output(directory: Path) -> None:
    last = read_json(forge_dir(directory) / _PLACE)
    if last is None:
        return
    make_directory(directory / "attempts")
    for rank, start in enumerate(last["begins"]):
        source = _output(directory, rank)
        try:
            path = directory / "attempts" / f"{last['attempt']}.log{suffix(rank)}"
            target = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                while chunk := os.pread(source, _CHUNK, start):
                    write_all(target, chunk)
                    start += len(chunk)
            finally:
                os.close(target)
        finally:
            os.close(source)


def _output(directory: Path, rank: int) -> int:
    path = directory / f"{OUTPUT}{suffix(rank)}"
    return open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
