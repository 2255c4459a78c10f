"""The attempts of a job: their numbers, and what each attempt of a command has printed.

<job dir>/output.log             all of it, as it comes, with a mark where an attempt begins
<job dir>/attempts/<n>.log       that of attempt n, once it is over; of rank 1 it is `<n>.log.1`
<job dir>/.forge/logs.json       where in the output the last attempt begins

The command writes to the output itself: no process of ours stands between, which could hold it up.
A full disk costs the marks and the files for each, and ends no job.
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


def next_number(directory: Path) -> int:
    """The number of the next attempt, over all starts of the job."""
    lines = read_if_there(job_ledger(directory)).splitlines()
    return 1 + sum('"kind": "attempt"' in line for line in lines)


def begin(directory: Path, ranks: int, number: int) -> None:
    """Mark where an attempt begins in what each rank prints; one that goes on has its mark."""
    with _told():
        _begin(directory, ranks, number)


def keep(directory: Path) -> None:
    """Put what the last attempt has printed into files of its own."""
    with _told():
        _keep(directory)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"forge: no separate log for each attempt: {error}\n".encode())


def _begin(directory: Path, ranks: int, number: int) -> None:
    before = read_json(forge_dir(directory) / _PLACE)
    if before is not None and before["attempt"] == number:
        return
    _keep(directory)
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


def _keep(directory: Path) -> None:
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
