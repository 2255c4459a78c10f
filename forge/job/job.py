"""A job over all of its starts: its state, its ledger and its budgets.

Every process that starts a job again has one: the wrapper of forge's launchers and, in a job that
has no wrapper, the outermost process of forge. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge import messages
from forge.filesystem.files import make_directory
from forge.job.ending import Ending
from forge.jobdir import job_state, jsonl, ledger
from forge.jobdir.job_files import forge_dir, job_ledger
from forge.jobdir.job_state import Counts, JobState, State
from forge.jobdir.plan import RequeueLimits


@dataclass(frozen=True)
class Trainings:
    """The trainings of a job, whose progress is seen in their directories."""

    directories: list[Path]
    checkpoint_dir: str
    """`checkpoint.dir` of the policy."""
    are_expected: bool = False
    """Whether an attempt that saves nothing counts as one without progress in any case; else only
    once there was a `forge.Run`, which a function or a command need not have."""

    def saved_step(self) -> int:
        """The number of steps that all trainings have saved; -1 before the first checkpoint."""
        saved = (ledger.saved_steps(one, self.checkpoint_dir) for one in self.directories)
        return sum(step + 1 for step in saved) - 1

    def has_stepped(self, since: float) -> bool:
        """Whether a training has done a step since that Unix time."""
        return any(ledger.has_stepped(one, since) for one in self.directories)

    def count_progress(self) -> bool:
        """Whether missing progress counts."""
        folders = [forge_dir(one) / "ledger" for one in self.directories]
        return self.are_expected or any(any(folder.glob("attempt_*")) for folder in folders)


def print_line(text: str) -> None:
    """Print a line into the job's output."""
    with contextlib.suppress(OSError):  # a full disk must not end the job
        os.write(2, messages.escape(f"forge: {text}\n", "\n\t").encode())


class Job:
    """The job, as the process sees it that starts it again.

    Args:
        directory: The job's directory.
        limits: When and how often it starts again.
        trainings: Shows its progress.
        state: What the job's state says in this start: the names of job and start, its nodes.
        say: Prints a line for people.
    """

    def __init__(
        self,
        directory: Path,
        limits: RequeueLimits,
        trainings: Trainings,
        state: JobState,
        say: Callable[[str], None] = print_line,
    ) -> None:
        self.directory = directory
        self.limits = limits
        self.trainings = trainings
        self.state = state
        """The state that was written last in this start."""
        self.say = say
        self.attempt = 0
        """Number of the current attempt, over all starts of the job."""
        self.took_s = 0.0
        """Seconds that the last attempt took."""

    @property
    def counts(self) -> Counts:
        """The restarts and failures so far."""
        return self.state.counts

    # -- the files -----------------------------------------------------------------------------

    def read(self) -> JobState | None:
        """The state that was written last in any start; None before the first."""
        return job_state.read(self.directory)

    def write(self, state: State, because: str = "", **changes: Any) -> None:
        """Replace the state; what it says of an end and of a hang are those of `changes`."""
        fields: dict[str, Any] = {
            "reason": None,
            "code": 0,
            "rank": 0,
            "hang": "",
            "ends_next_start": False,
        }
        fields |= {"state": state, "because": because, "time": time.time()}
        self.state = replace(self.state, **fields | changes)
        try:
            make_directory(forge_dir(self.directory))
            self.state.write(self.directory)
        except OSError as error:  # a full disk must not end the job
            self.say(f"state.json cannot be written: {error}")

    def record(self, kind: str, **values: Any) -> None:
        """Add an event to the job's ledger."""
        try:
            jsonl.append(job_ledger(self.directory), kind, **values)
        except OSError as error:
            path = job_ledger(self.directory)
            self.say(f"the job's history, {path}, cannot be written: {error}")

    # -- from start to start -------------------------------------------------------------------

    def set_budgets(self, before: JobState | None) -> None:
        """Continue with the budgets of an earlier start; None: begin with new ones."""
        events = jsonl.events(job_ledger(self.directory))
        self.attempt = sum(one["kind"] == "attempt" for one in events)
        if before is None:
            return self.set_counts(Counts(best_step=self.trainings.saved_step()))
        counts, began, because = before.counts, before.began, before.because
        self.state = replace(self.state, counts=counts, began=began, because=because)
        progress = ledger.read_progress(self.directory)
        self.took_s = max(progress.began - before.began, 0.0) if progress is not None else 0.0

    def set_backend(self, **fields: Any) -> None:
        """Set fields of the state that only the backend reads; None removes a field."""
        merged = self.state.backend | fields
        kept = {name: value for name, value in merged.items() if value is not None}
        self.state = replace(self.state, backend=kept)

    def set_counts(self, counts: Counts) -> None:
        """Replace the counts."""
        self.state = replace(self.state, counts=counts)

    def begin_attempt(self) -> None:
        """Note the number of the attempt, and when it begins."""
        self.attempt += 1
        self.state = replace(self.state, began=time.time())

    def record_start(self, kind: str = "attempt") -> None:
        """Add the start of an attempt, or of its recovery command, to the ledger.

        Args:
            kind: `attempt` or `recovery`.
        """
        where = {"job": self.state.job, "nodes": self.state.nodes}
        self.record(kind, attempt=self.attempt, restarts=self.counts.restarts, **where)

    def record_end(self, ending: Ending, section: str = "") -> None:
        """Add the end of an attempt, or of its recovery command, to the ledger.

        Args:
            ending: The end.
            section: The section of the last heartbeat of the rank that ended it; empty if unknown.
        """
        said = {"reason": ending.reason.name, "state": ending.ended_as, "text": ending.text}
        where = {"rank": ending.rank, "node": ending.node or self.state.host, "section": section}
        self.record("end", attempt=self.attempt, code=ending.code, **where, **said)

    def end_attempt(self) -> None:
        """Note how long the attempt took."""
        self.took_s = max(time.time() - self.state.began, 0.0)

    # -- the end -------------------------------------------------------------------------------

    def repeat_end(self, before: JobState) -> int:
        """End this start as the one before, in which the job was given up; returns its exit code.

        The start after this one has new budgets: a person has asked for it.
        """
        self.set_budgets(before)
        self.say(f"{before.state.value}: {before.because}")
        ended = {"reason": before.reason, "code": before.code, "rank": before.rank}
        self.write(before.state, before.because, **ended)
        return before.exit_code

    def end(self, ending: Ending, because: str, *, is_requeued: bool = False) -> int:
        """End the job, which is not started again.

        Args:
            ending: The end of the last attempt.
            because: Why the job ends, for people.
            is_requeued: Whether the scheduler will start it nevertheless: that start ends at once.
        Returns:
            The exit code of this process.
        """
        self.record(ending.state.name, because=because)
        ended = {"reason": ending.reason, "rank": ending.rank, "ends_next_start": is_requeued}
        self.write(ending.state, because, code=ending.code, **ended)
        return ending.exit_code
