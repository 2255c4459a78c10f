"""The ledgers of a job, read: the log of an uninterrupted run, merged from those of its attempts.

`forge/jobdir/ledger_writer.py` says what files there are. Processes without a rank, such as the
job's wrapper, read those of rank 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import ForgeError
from forge.filesystem.files import read_plain
from forge.jobdir import ledger_writer
from forge.jobdir.job_files import forge_dir, saved_step
from forge.jobdir.ledger_writer import Progress, events_of, shares

__all__ = ["AttemptLog", "History", "Progress", "read", "read_progress"]


def read_progress(job_dir: Path | str) -> Progress | None:
    """The progress of a job; as cheap as reading a small file.

    Args:
        job_dir: The job's output directory.
    Returns:
        The step that was started last, in any of its Runs, or None before the first step.
    """
    try:
        raw = read_plain(ledger_writer.progress_file(job_dir))
    except FileNotFoundError:
        return None
    found = [one for one in ledger_writer.records(raw) if one is not None]
    return max(found, key=lambda one: one.began, default=None)


def saved_steps(job_dir: Path, checkpoint_dir: str) -> int:
    """Steps in the newest checkpoints of all Runs of a job, summed; -1 without a checkpoint.

    The ledger names the checkpoint directories of the Runs.

    Args:
        checkpoint_dir: The directory in the policy, for a Run that no ledger names.
    """
    told = [one.checkpoints for one in shares(job_dir)]
    directories = {os.path.normpath(job_dir / one) for one in (checkpoint_dir, *told)}
    return sum(saved_step(Path(one)) + 1 for one in directories) - 1


def has_stepped(job_dir: Path, since: float) -> bool:
    """Whether a Run that began after that Unix time has done a step, which it could have saved."""
    progress = read_progress(job_dir)
    if progress is None or progress.began <= since:
        return False
    starts = [one for one in events_of(job_dir, progress.attempt) if one["kind"] == "start"]
    return bool(starts) and progress.step > starts[0]["step"]


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
    for share in shares(job_dir):
        events = events_of(job_dir, share.number)
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
