"""The ledger: a log of a job's events that loses at most the last line if the job is killed.

Each attempt appends JSON lines to its own file, `<job dir>/.forge/ledger/attempt_<k>.jsonl`, which
`forge/jobdir/ledger.py` reads. A job can have several Runs, one after the other: the first line of
each file names the Run, by its checkpoint directory. In addition a memory-mapped file has the
current step, in 32 bytes per Run: it survives SIGKILL and costs nothing. Each rank has its own
files: those of rank 1 are `ledger.1` and `progress.1`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forge.filesystem.files import make_directory, open_file
from forge.jobdir import jsonl, process_id
from forge.jobdir.job_files import forge_dir, saved_step, suffix

_PROGRESS = struct.Struct("<4sIqdq")  # magic, attempt, step, unix time of its begin, planned
_MAGIC = b"FRG1"
_ATTEMPT_FILE = re.compile(r"attempt_(\d+)\.jsonl")


class Ledger:
    """Writes the ledger of one attempt."""

    def __init__(self, job_dir: Path, checkpoint_dir: Path | None = None) -> None:
        """Open the file of a new attempt in `job_dir`; its number is one above the last.

        `checkpoint_dir` is the Run's own; None if it is the only Run of the job.
        """
        self.previous_step: int | None = None
        """The last step that the previous attempt of this Run began."""
        folder = _folder(job_dir)
        make_directory(folder)
        self.run = _run_in(checkpoint_dir or job_dir, job_dir)
        """Name of the Run: its checkpoint directory, relative to the job's if it is below it."""
        number = max(_numbers(folder), default=0) + 1
        while True:
            path = _attempt_file(job_dir, number)
            try:
                self._fd = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:  # another process took the number just now
                number += 1
        self.attempt = number
        self._unwritten = b""
        # Background saves also write here, and submitit's signal handler, in this same thread.
        self._lock = threading.RLock()
        self._map_progress(job_dir)
        self.write("run", checkpoints=self.run, pid=os.getpid(), owner=process_id.owner())

    def write(self, kind: str, **values: Any) -> None:
        """Append one event; only a crash of the machine can tear it."""
        self.write_all(kind, [values])

    def write_all(self, kind: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Append several events of one kind in one write."""
        head = {"t": round(time.time(), 3), "kind": kind}
        lines = "".join(f"{json.dumps({**head, **values})}\n" for values in events)
        with self._lock, contextlib.suppress(OSError):  # the next call retries; `sync` raises
            self._unwritten += lines.encode()
            self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]

    def progress(self, step: int, planned: int | None = None) -> None:
        """Record the step that begins now, and the planned number of steps."""
        values = (_MAGIC, self.attempt, step, time.time(), planned or 0)
        _PROGRESS.pack_into(self._progress, self._offset, *values)

    def sync(self) -> None:
        """Make everything written so far survive a power cut.

        Raises:
            OSError: From the disk; no event is lost, the next call tries again.
        """
        with self._lock:
            self._flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the files."""
        os.close(self._fd)
        self._fd = -1  # the system can reuse the number for another file
        self._progress.close()

    def _map_progress(self, job_dir: Path) -> None:
        """Map the file, and find or add this Run's record."""
        fd = open_file(progress_file(job_dir), os.O_RDWR | os.O_CREAT)
        try:
            content = os.pread(fd, os.fstat(fd).st_size, 0)
            known = records(content)
            runs = [one and _share(job_dir, one.attempt).checkpoints for one in known]
            free = runs.index(None) if None in runs else len(runs)
            index = runs.index(self.run) if self.run in runs else free
            self._offset = index * _PROGRESS.size
            if index < len(known) and (previous := known[index]) is not None:
                self.previous_step = previous.step
            size = max(len(known), index + 1) * _PROGRESS.size
            # Write zeros, not only ftruncate: a full disk raises here instead of a SIGBUS later.
            os.pwrite(fd, content[:size].ljust(size, b"\0"), 0)
            os.ftruncate(fd, size)
            self._progress = mmap.mmap(fd, size)
        finally:
            os.close(fd)


def _run_in(checkpoint_dir: Path, job_dir: Path) -> str:
    """The checkpoint directory, relative if possible, since a job's directory can be moved."""
    is_below = checkpoint_dir.is_relative_to(job_dir)
    return str(checkpoint_dir.relative_to(job_dir) if is_below else checkpoint_dir)


def _numbers(folder: Path) -> Iterable[int]:
    matches = (_ATTEMPT_FILE.fullmatch(name) for name in os.listdir(folder))
    return (int(match[1]) for match in matches if match)


class Progress(NamedTuple):
    """The step that was last begun."""

    attempt: int
    step: int
    began: float
    """Unix time at which it began."""
    planned: int | None
    """The planned number of steps."""


def records(content: bytes) -> list[Progress | None]:
    """One record per Run; None for an invalid one."""
    whole = content[: len(content) // _PROGRESS.size * _PROGRESS.size]
    return [
        Progress(attempt, step, began, planned or None) if magic == _MAGIC else None
        for magic, attempt, step, began, planned in _PROGRESS.iter_unpack(whole)
    ]


def has_finished(job_dir: Path, checkpoint_dir: Path) -> bool:
    """Whether this process, or one with the same owner, has finished the training in there."""
    run, owner = _run_in(checkpoint_dir, job_dir), process_id.owner()
    own = [one for one in shares(job_dir) if (one.checkpoints, one.owner) == (run, owner)]
    is_ended = any(
        event["kind"] == "finish" for one in own for event in events_of(job_dir, one.number)
    )
    return is_ended and saved_step(checkpoint_dir) >= 0


def last_save(job_dir: Path, run: str) -> int | None:
    """The step of the last checkpoint that the attempts of a Run have saved; None: of none."""
    for one in reversed(shares(job_dir)):
        path = _attempt_file(job_dir, one.number)
        events = jsonl.tail(path, b'"kind": "save",')[0] if one.checkpoints == run else []
        steps = [int(event["step"]) for event in events if event["kind"] == "save"]
        if steps:
            return steps[-1]
    return None


def starts(job_dir: Path, run: str) -> Iterator[dict[str, Any]]:
    """The event `start` of each attempt of a Run that came so far, the newest first."""
    for one in reversed(shares(job_dir)):
        events = jsonl.head(_attempt_file(job_dir, one.number)) if one.checkpoints == run else ()
        yield from (event for event in events if event["kind"] == "start")


class Share(NamedTuple):
    """The Run and the process of an attempt."""

    number: int
    checkpoints: str = "."
    """The Run's checkpoint directory, which identifies the Run."""
    pid: int = 0
    owner: str = ""
    """See `process_id.owner`."""


def shares(job_dir: Path | str) -> list[Share]:
    """One for each attempt, in order."""
    folder = _folder(job_dir)
    return [_share(job_dir, one) for one in sorted(_numbers(folder))] if folder.is_dir() else []


def _share(job_dir: Path | str, number: int) -> Share:
    """Read it from the first line; if that is lost, assume the job's only Run."""
    try:
        event = next(jsonl.head(_attempt_file(job_dir, number)), None)
    except OSError:
        event = None
    if event is None or event["kind"] != "run":
        return Share(number)
    return Share(number, event["checkpoints"], event["pid"], event["owner"])


def attempt_files(job_dir: Path | str) -> list[tuple[int, Path]]:
    """(number, path) of the ledger of each process that entered a Run, in order."""
    folder = _folder(job_dir)
    try:
        return [(one, _attempt_file(job_dir, one)) for one in sorted(_numbers(folder))]
    except FileNotFoundError:
        return []


def _folder(job_dir: Path | str) -> Path:
    return forge_dir(job_dir) / f"ledger{suffix()}"


def progress_file(job_dir: Path | str) -> Path:
    """The memory-mapped file with the current step of each Run."""
    return forge_dir(job_dir) / f"progress{suffix()}"


def _attempt_file(job_dir: Path | str, number: int) -> Path:
    return _folder(job_dir) / f"attempt_{number:04d}.jsonl"


def events_of(job_dir: Path | str, number: int) -> list[dict[str, Any]]:
    """The events of one attempt; lines that a crash tore are skipped."""
    return list(jsonl.events(_attempt_file(job_dir, number)))
