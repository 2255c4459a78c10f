"""The ledger: a log of a job's events that loses at most the last line if the job is killed.

Each attempt appends JSON lines to its own file, `<job dir>/.forge/ledger/attempt_<k>.jsonl`; `read`
merges them into the log of an uninterrupted run. A job can have several Runs, one after the other:
the first line of each file names the Run, by its checkpoint directory. In addition a memory-mapped
file has the current step, in 32 bytes per Run: it survives SIGKILL and costs nothing. Each rank has
its own files: those of rank 1 are `ledger.1` and `progress.1`. Processes without a rank, such as
the job's wrapper, read those of rank 0.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forge.errors import ForgeError
from forge.filesystem.files import make_directory, open_file, read_plain
from forge.jobdir import jsonl, spawned
from forge.jobdir.job_files import forge_dir, saved_step, suffix

__all__ = ["AttemptLog", "History", "Progress", "read", "read_progress"]

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
        self.write("run", checkpoints=self.run, pid=os.getpid(), owner=spawned.owner())

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
        fd = open_file(_progress_file(job_dir), os.O_RDWR | os.O_CREAT)
        try:
            content = os.pread(fd, os.fstat(fd).st_size, 0)
            records = _records(content)
            runs = [one and _share(job_dir, one.attempt).checkpoints for one in records]
            free = runs.index(None) if None in runs else len(runs)
            index = runs.index(self.run) if self.run in runs else free
            self._offset = index * _PROGRESS.size
            if index < len(records) and (previous := records[index]) is not None:
                self.previous_step = previous.step
            size = max(len(records), index + 1) * _PROGRESS.size
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


def _records(content: bytes) -> list[Progress | None]:
    """One record per Run; None for an invalid one."""
    whole = content[: len(content) // _PROGRESS.size * _PROGRESS.size]
    return [
        Progress(attempt, step, began, planned or None) if magic == _MAGIC else None
        for magic, attempt, step, began, planned in _PROGRESS.iter_unpack(whole)
    ]


def read_progress(job_dir: Path | str) -> Progress | None:
    """The progress of a job; as cheap as reading a small file.

    Args:
        job_dir: The job's output directory.
    Returns:
        The step that was started last, in any of its Runs, or None before the first step.
    """
    try:
        raw = read_plain(_progress_file(job_dir))
    except FileNotFoundError:
        return None
    found = [one for one in _records(raw) if one is not None]
    return max(found, key=lambda one: one.began, default=None)


def saved_steps(job_dir: Path, checkpoint_dir: str) -> int:
    """Steps in the newest checkpoints of all Runs of a job, summed; -1 without a checkpoint.

    The ledger names the checkpoint directories of the Runs.

    Args:
        checkpoint_dir: The directory in the policy, for a Run that no ledger names.
    """
    told = [one.checkpoints for one in _shares(job_dir)]
    directories = {os.path.normpath(job_dir / one) for one in (checkpoint_dir, *told)}
    return sum(saved_step(Path(one)) + 1 for one in directories) - 1


def has_stepped(job_dir: Path, since: float) -> bool:
    """Whether a Run that began after that Unix time has done a step, which it could have saved."""
    progress = read_progress(job_dir)
    if progress is None or progress.began <= since:
        return False
    starts = [one for one in _events(job_dir, progress.attempt) if one["kind"] == "start"]
    return bool(starts) and progress.step > starts[0]["step"]


def has_finished(job_dir: Path, checkpoint_dir: Path) -> bool:
    """Whether this process, or one with the same owner, has finished the training in there."""
    run, owner = _run_in(checkpoint_dir, job_dir), spawned.owner()
    own = [one for one in _shares(job_dir) if (one.checkpoints, one.owner) == (run, owner)]
    is_ended = any(
        event["kind"] == "finish" for one in own for event in _events(job_dir, one.number)
    )
    return is_ended and saved_step(checkpoint_dir) >= 0


def trainers(job_dir: Path) -> set[int]:
    """Pids of this process and its children that entered a Run; some can have ended."""
    owner = spawned.owner()
    return {one.pid for one in _shares(job_dir) if one.owner == owner}


def last_attempt(job_dir: Path) -> int:
    """The number of the newest attempt of any Run; 0 before the first."""
    return max((one.number for one in _shares(job_dir)), default=0)


def lost_run(job_dir: Path, after: int) -> str | None:
    """The checkpoint directory of a Run, later than attempt `after`, whose process died in it.

    Only children of main's process count: main's own end is seen by its parent. Only the last
    attempt of a Run counts, since main can have started another child for it.
    """
    last = {one.checkpoints: one for one in _shares(job_dir) if one.number > after}
    for place, one in last.items():
        is_child = bool(one.owner) and one.owner.split()[1] != str(one.pid)
        kinds = {event["kind"] for event in _events(job_dir, one.number)}
        if is_child and not kinds & {"finish", "stop", "halt", "error"}:
            return place
    return None


class _Share(NamedTuple):
    """The Run and the process of an attempt."""

    number: int
    checkpoints: str = "."
    """The Run's checkpoint directory, which identifies the Run."""
    pid: int = 0
    owner: str = ""
    """See `spawned.owner`."""


def _shares(job_dir: Path | str) -> list[_Share]:
    """One for each attempt, in order."""
    folder = _folder(job_dir)
    return [_share(job_dir, one) for one in sorted(_numbers(folder))] if folder.is_dir() else []


def _share(job_dir: Path | str, number: int) -> _Share:
    """Read it from the first line; if that is lost, assume the job's only Run."""
    try:
        event = next(jsonl.head(_attempt_file(job_dir, number)), None)
    except OSError:
        event = None
    if event is None or event["kind"] != "run":
        return _Share(number)
    return _Share(number, event["checkpoints"], event["pid"], event["owner"])


def attempt_files(job_dir: Path | str) -> list[tuple[int, Path]]:
    """(number, path) of the ledger of each process that entered a Run, in order."""
    folder = _folder(job_dir)
    try:
        return [(one, _attempt_file(job_dir, one)) for one in sorted(_numbers(folder))]
    except FileNotFoundError:
        return []


def _folder(job_dir: Path | str) -> Path:
    return forge_dir(job_dir) / f"ledger{suffix()}"


def _progress_file(job_dir: Path | str) -> Path:
    return forge_dir(job_dir) / f"progress{suffix()}"


def _attempt_file(job_dir: Path | str, number: int) -> Path:
    return _folder(job_dir) / f"attempt_{number:04d}.jsonl"


def _events(job_dir: Path | str, number: int) -> list[dict[str, Any]]:
    """The events of one attempt; lines that a crash tore are skipped."""
    return list(jsonl.events(_attempt_file(job_dir, number)))


@dataclass
class AttemptLog:
    """The events of one process in a Run."""

    number: int
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def start_step(self) -> int:
        """Steps done when this attempt began; 0 if it died before it resumed."""
        starts = [event for event in self.events if event["kind"] == "start"]
        return int(starts[0]["step"]) if starts else 0


@dataclass
class History:
    """The history of a job, over all its attempts."""

    attempts: list[AttemptLog]
    runs: dict[str, dict[int, dict[str, float]]]
    """Checkpoint directory of each Run, relative to the job's directory -> its metrics."""

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """step -> name -> value, as an uninterrupted Run would have logged them.

        Raises:
            ForgeError: If the job has several Runs; use `runs`.
        """
        if len(self.runs) > 1:
            raise ForgeError(
                f"This job has several Runs: {', '.join(self.runs)}. Choose the metrics of one Run:"
                f" `.runs[{next(iter(self.runs))!r}]`"
            )
        return next(iter(self.runs.values()), {})


def read(job_dir: Path | str) -> History:
    """Merge the ledgers of a job; lines that a crash tore are skipped.

    Args:
        job_dir: The job's output directory.
    Returns:
        The job's attempts, and the metrics of its Runs; both are empty before its first start.
    Raises:
        FileNotFoundError: If it is not a job's directory.
    """
    if not forge_dir(job_dir).is_dir():
        raise FileNotFoundError(
            f"{os.path.abspath(job_dir)}: expected the directory of a job, found no"
            " `.forge` in it. A job of a sweep has its own directory below the sweep's; without"
            " Hydra, a job's directory is `checkpoint.dir`."
        )
    history = History([], {})
    for share in _shares(job_dir):
        events = _events(job_dir, share.number)
        history.attempts.append(AttemptLog(share.number, events))
        if not events:
            continue  # killed before it wrote the first line
        run = history.runs.setdefault(share.checkpoints, {})
        for event in events:
            if event["kind"] in ("start", "rollback"):
                _forget_after(run, event["step"])
            elif event["kind"] == "metrics":
                run.setdefault(event["step"], {}).update(event["values"])
    history.runs = {name: dict(sorted(run.items())) for name, run in history.runs.items()}
    return history


def _forget_after(metrics: dict[int, dict[str, float]], step: int) -> None:
    """Drop the metrics of steps from `step` on, which are repeated."""
    for logged in [one for one in metrics if one >= step]:
        del metrics[logged]
