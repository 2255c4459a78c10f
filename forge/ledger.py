"""What happened to a job, kept so that a kill at any moment loses at most the last line.

Each attempt appends JSON lines to a file of its own, `<job dir>/.forge/ledger/attempt_<k>.jsonl`;
`read` merges them into what an undisturbed run would have recorded. Beside them a file of 32
bytes, mapped into memory, holds the step that is under way: it survives SIGKILL and costs nothing.
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forge.files import make_directory, open_file, read_plain
from forge.job_files import forge_dir

_PROGRESS = struct.Struct("<4sIqdq")  # magic, attempt, step, unix time of its begin, planned
_MAGIC = b"FRG1"
_ATTEMPT_FILE = re.compile(r"attempt_(\d+)\.jsonl")


class Ledger:
    """The writer of one attempt."""

    def __init__(self, job_dir: Path) -> None:
        """Open a new attempt's file below `job_dir`; its number is one above the last."""
        folder = forge_dir(job_dir) / "ledger"
        make_directory(folder)
        previous = read_progress(job_dir)
        self.previous_step = previous[1] if previous else None
        number = max(_numbers(folder), default=0) + 1
        while True:
            path = folder / f"attempt_{number:04d}.jsonl"
            try:
                self._fd = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:  # another attempt took the number just now
                number += 1
        self.attempt = number
        self._unwritten = b""
        self._lock = threading.Lock()  # a save beside training writes here as well
        self._progress = _map_progress(forge_dir(job_dir) / "progress")

    def write(self, kind: str, **values: Any) -> None:
        """Append one event; torn only if the machine dies in the middle of it."""
        line = json.dumps({"t": round(time.time(), 3), "kind": kind, **values})
        with self._lock, contextlib.suppress(OSError):  # kept for the next; `sync` is what tells
            self._unwritten += line.encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]

    def progress(self, step: int, planned: int | None = None) -> None:
        """Note which step begins now, and how many there are to be."""
        now = time.time()
        _PROGRESS.pack_into(self._progress, 0, _MAGIC, self.attempt, step, now, planned or 0)

    def sync(self) -> None:
        """Make everything written so far survive a power cut.

        Raises:
            OSError: Where the disk does not take it; nothing is lost, the next call tries again.
        """
        with self._lock:
            self._flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the files."""
        os.close(self._fd)
        self._progress.close()


def _map_progress(path: Path) -> mmap.mmap:
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        # Written, not only made longer: a full disk is an error here, but SIGBUS in a mapping.
        os.pwrite(fd, os.pread(fd, _PROGRESS.size, 0).ljust(_PROGRESS.size, b"\0"), 0)
        os.ftruncate(fd, _PROGRESS.size)
        return mmap.mmap(fd, _PROGRESS.size)
    finally:
        os.close(fd)


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
    """Steps that there are to be."""


def read_progress(job_dir: Path | str) -> Progress | None:
    """The step that was last begun, or None before the first."""
    try:
        raw = read_plain(forge_dir(job_dir) / "progress")
    except FileNotFoundError:
        return None
    if len(raw) != _PROGRESS.size:
        return None
    magic, attempt, step, began, planned = _PROGRESS.unpack(raw)
    return Progress(attempt, step, began, planned or None) if magic == _MAGIC else None


@dataclass
class Attempt:
    """One process's share of a job."""

    number: int
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def start_step(self) -> int:
        """Steps done when this attempt began; 0 where it died before it knew."""
        starts = [event for event in self.events if event["kind"] == "start"]
        return int(starts[0]["step"]) if starts else 0


@dataclass
class History:
    """A whole job, over all its attempts."""

    attempts: list[Attempt]
    metrics: dict[int, dict[str, float]]
    """step -> name -> value: what an undisturbed run would have logged."""


def read(job_dir: Path | str) -> History:
    """Merge the ledgers of a job; lines that a crash tore are left out."""
    folder = forge_dir(job_dir) / "ledger"
    attempts = []
    for number in sorted(_numbers(folder)) if folder.is_dir() else ():
        text = read_plain(folder / f"attempt_{number:04d}.jsonl").decode(errors="replace")
        attempts.append(
            Attempt(number, [event for event in map(_parse, text.split("\n")) if event])
        )
    metrics: dict[int, dict[str, float]] = {}
    for attempt in attempts:
        for event in attempt.events:
            if event["kind"] in ("start", "rollback"):
                _forget_after(metrics, event["step"], keeps_step=event.get("replays", False))
            elif event["kind"] == "metrics":
                metrics.setdefault(event["step"], {}).update(event["values"])
    return History(attempts, dict(sorted(metrics.items())))


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _forget_after(metrics: dict[int, dict[str, float]], step: int, keeps_step: bool) -> None:
    """Drop what was logged by steps that are done again from `step` on."""
    for logged in [s for s in metrics if s > step or (s == step and not keeps_step)]:
        del metrics[logged]
