"""One stage of an attempt: a task, started on all ranks; and how the ranks have ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge.errors import ExitCode, Reason
from forge.job.ending import Ending
from forge.job.task import Task
from forge.jobdir import ledger, node_fault, verdict
from forge.jobdir.job_files import RESULT, forge_dir, suffix
from forge.jobdir.plan import JobPlan
from forge.jobdir.rank_report import RankReport
from forge.jobdir.verdict import Verdict

Ended = tuple[float, Ending]
"""The Unix time at which a rank's task ended, infinite if it is not known; and its end."""


@dataclass(frozen=True)
class Stage:
    """A task on all ranks of a job."""

    directory: Path
    """The job's directory."""
    plan: JobPlan
    task: Task
    environment: dict[str, str] = field(default_factory=dict)
    """The environment of the task."""
    last_run: int = 0
    """Number of the newest attempt of a Run in the ledger before the stage."""

    def end_of(self, report: RankReport, rank: int) -> Ended:
        """The end of a rank, from its supervisor's report and its own verdict."""
        return report.time, replace(self._ending(report, rank), rank=rank, node=report.node)

    def _ending(self, report: RankReport, rank: int) -> Ending:
        if self.task.exec is not None:
            return Ending.of_command(report, self.task.exec, self.plan.actions)
        code, said = report.code, verdict.read(self.directory, rank)
        if code == ExitCode.FINISHED and not self._has_returned(said, rank):
            return Ending.of(1, text="ended with code 0 before main had returned (os._exit, fork?)")
        lost = ledger.lost_run(self.directory, self.last_run)
        if code == ExitCode.FINISHED and lost is not None:
            # Report it as the end of the task: main has ignored it.
            text = (
                "main returned, but a child process died inside its `with forge.Run(…)` block:"
                f" its training in {lost} is not finished"
            )
            return Ending.of(-signal.SIGKILL, text=text)
        if code == ExitCode.UNHEALTHY and (found := node_fault.read(self.directory, rank)):
            return Ending.of(code, found.reason, found.text)
        if said is not None and said.exit_code == code:
            return Ending.of(code, said.reason, said.text, is_held=report.is_held)
        return Ending.of(code, is_held=report.is_held, oom_kills=report.oom_kills)

    def _has_returned(self, said: Verdict | None, rank: int) -> bool:
        """Whether the task's main returned, or its training finished."""
        has_trained = said is not None and said.exit_code == ExitCode.FINISHED
        return has_trained or (forge_dir(self.directory) / f"{RESULT}{suffix(rank)}").exists()

    def first_end(self, ends: Sequence[Ended]) -> Ending:
        """The end of the rank that failed first.

        A rank that exits because it lost another rank, or because another rank's node is sick, has
        not ended the job, whenever it exits.
        """
        faults = node_fault.read_all(self.directory, len(ends))
        sick = {rank for rank, one in faults.items() if one.node}

        def order(rank: int) -> tuple[bool, float, int]:
            at, ending = ends[rank]
            is_healthy = bool(sick) and rank not in sick and ending.code == ExitCode.UNHEALTHY
            return is_healthy or ending.reason is Reason.rank_lost, at, ending.code

        failed = [rank for rank, (_, ending) in enumerate(ends) if not ending.is_finished]
        first = min(failed, key=order, default=0)
        return replace(ends[first][1], rank=first)
