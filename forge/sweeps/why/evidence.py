"""The facts about a job: read once, lazily, from its directory; the rules only look at them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.jobdir.jsonl import Event
from forge.sweeps import attempts, output, reader
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.job import SweepJob
from forge.sweeps.reader import Files
from forge.sweeps.sweep import Sweep
from forge.sweeps.why.causes import Cause


@dataclass(frozen=True)
class Explanation:
    """A cause."""

    cause: Cause
    text: str
    """A sentence that says what happened."""
    evidence: tuple[str, ...] = ()
    """Where forge has it from: a file, an event, a line of the output."""
    remedy: tuple[str, ...] = ()
    """Changes that help: a command, or a key of the policy and its value."""


class Evidence:
    """The files of a job.

    Args:
        sweep: The sweep of the job.
        job: The job.
    """

    def __init__(self, sweep: Sweep, job: SweepJob) -> None:
        self.sweep = sweep
        self.job = job

    @property
    def directory(self) -> Path:
        """The job's directory."""
        return self.job.directory

    @functools.cached_property
    def files(self) -> Files:
        """State, plan, verdict, and the end of the ledger."""
        return reader.files_of(self.job.directory)

    @functools.cached_property
    def attempts(self) -> list[AttemptRecord]:
        """All attempts, the oldest first."""
        return attempts.read(self.job.directory)

    @property
    def last_ended(self) -> AttemptRecord | None:
        """The last attempt whose end is recorded."""
        return next((one for one in reversed(self.attempts) if one.ended is not None), None)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of the job's restarts, as its plan has them."""
        return dict(self.files.plan.get("requeue") or {})

    @property
    def counts(self) -> dict[str, Any]:
        """How much of the limits is used."""
        return asdict(self.files.state.counts) if self.files.state else {}

    @functools.cached_property
    def output(self) -> str:
        """The end of the output of the rank that ended the job."""
        return output.end_of(self.job.directory, self.job.rank)

    def output_file(self) -> str:
        """The file with that output."""
        return str(output.path_of(self.job.directory, self.job.rank))

    def events(self, *kinds: str, attempt: AttemptRecord | None = None) -> Iterator[Event]:
        """The events of these kinds, of one attempt or of all."""
        for one in [attempt] if attempt is not None else self.attempts:
            yield from (event for event in one.events if event["kind"] in kinds)
