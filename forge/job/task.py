"""The task of a job: what its ranks run in one stage of an attempt, its start, a stop, and its end.

    main       the user's main function: it uses forge, and reports why it ends
    command    a command of `forge exec`: its supervisor knows by which signals it was stopped, and
               of its exit codes only 0 and 75 have a meaning
    recovery   the command of a rule in `requeue.rules`: a first stage, before main or the command

All ranks run main and the command; a recovery command runs once, below the supervisor of rank 0.
Standard library only.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge.config.schema import HangAction
from forge.errors import ExitCode, Reason
from forge.job.command import CommandSupervisor
from forge.job.ending import Ending
from forge.job.hang_watch import HangWatch
from forge.job.supervisor import Supervisor
from forge.jobdir import node_fault, rank_report, verdict
from forge.jobdir.job_files import (
    ATTEMPT,
    PROGRESS,
    RANKS,
    RECOVERS,
    RESULT,
    RETURN_CODE,
    forge_dir,
    suffix,
)
from forge.jobdir.plan import ExecPlan, JobPlan
from forge.jobdir.rank_report import RankReport
from forge.jobdir.verdict import Verdict

Ended = tuple[float, Ending]
"""The Unix time at which a rank's task ended, infinite if it is not known; and its end."""


@dataclass(frozen=True)
class Task:
    """A program for all ranks of a job; made by `main`, `command` or `recovery`."""

    directory: Path
    """The job's directory."""
    plan: JobPlan
    words: list[str]
    """The command line that starts it."""
    exec: ExecPlan | None = None
    """For a command: how to stop it, and what its exit code means; None: it is main."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of this stage."""
    kind: str = "attempt"
    """Name of the event in the job's ledger with which the stage begins."""

    @classmethod
    def main(cls, directory: Path, plan: JobPlan) -> Task:
        """The user's main function, started by `forge/launch/task.py`."""
        return cls(directory, plan, plan.command)

    @classmethod
    def command(cls, directory: Path, plan: JobPlan) -> Task:
        """The command of a job of `forge exec`."""
        return cls(directory, plan, plan.command, plan.exec)

    @classmethod
    def recovery(
        cls, directory: Path, plan: JobPlan, recovery: Mapping[str, int], attempt: int
    ) -> Task:
        """The recovery command of a rule.

        Args:
            directory: The job's directory.
            plan: The job's plan.
            recovery: The number of the rule, and the exit code that it is for (`Counts.recovery`).
            attempt: The number of the attempt before.
        """
        rule, code = recovery["rule"], recovery["code"]
        variables = {ATTEMPT: str(attempt), RETURN_CODE: str(code), RECOVERS: str(rule)}
        words = plan.requeue.rules[rule].recover
        return cls(directory, plan, words, ExecPlan(), variables, "recovery")

    @classmethod
    def of(cls, directory: Path, plan: JobPlan) -> Task:
        """Main, or the command."""
        make = cls.main if plan.exec is None else cls.command
        return make(directory, plan)

    @classmethod
    def in_environment(
        cls, directory: Path, plan: JobPlan, environment: Mapping[str, str], rank: int
    ) -> Task:
        """The task of a rank, in a process that the wrapper has started with `variables`."""
        if RECOVERS not in environment:
            return cls.of(directory, plan)
        rule, code, attempt = (int(environment[one]) for one in (RECOVERS, RETURN_CODE, ATTEMPT))
        return cls.recovery(directory, plan, {"rule": rule, "code": code}, attempt).of_rank(rank)

    def of_rank(self, rank: int) -> Task:
        """The task of one of the ranks: only rank 0 runs a recovery command."""
        return replace(self, words=["true"]) if rank and self.kind == "recovery" else self

    @property
    def is_main(self) -> bool:
        """Whether it is main: forge runs inside of it, prints its progress and sees its steps."""
        return self.exec is None

    # -- its start, and a stop -----------------------------------------------------------------

    def rank_variables(self, size: int, environment: Mapping[str, str]) -> dict[str, str]:
        """The variable with the number of ranks.

        A single command has none, since it can be an srun with tasks of its own, unless the
        `environment` shows that this process is one of several of a Slurm step.
        """
        is_one_of_many = int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1
        return {RANKS: str(size)} if self.is_main or size > 1 or is_one_of_many else {}

    def supervisor(
        self,
        rank: int,
        environment: dict[str, str],
        output: int,
        parent: int,
        early: Path | None = None,
    ) -> Supervisor:
        """The parent of a rank's process, which starts it.

        Args:
            rank: The rank.
            environment: The environment of the task; the supervisor adds its own variables to it.
            output: Descriptor that becomes the task's stdout and stderr.
            parent: pid of the process that starts the supervisor.
            early: File with the names of signals that came before the supervisor started, or None.
        """
        plan, report = self.plan, rank_report.path_of(self.directory, rank)
        environment.pop(PROGRESS, None)  # set by a job around this one
        shared: dict[str, Any] = {
            **{"command": self.words, "environment": environment, "output": output},
            **{"actions": plan.actions, "timeout_s": plan.timeout_s, "announcement": plan.signal},
            **{"report": report, "parent": parent, "cwd": plan.cwd, "early": early},
        }
        if self.exec is not None:
            return CommandSupervisor(
                **shared,
                plan=self.exec,
                directory=self.directory,
                is_signalled_by_others=plan.slurm is not None,
            )
        found = Supervisor(**shared)
        if plan.hang != HangAction.ignore.name:
            found.hang_watch = HangWatch(forge_dir(self.directory), environment)
            environment.update(found.hang_watch.environ)
        return found

    def stop_signal(self, number: int) -> int:
        """The signal that the task gets for SIGINT or SIGTERM to its job: commands have their own.

        Any other signal is returned as it is.
        """
        is_stop = number in (signal.SIGINT, signal.SIGTERM)
        return number if self.is_main or not is_stop else signal.Signals[f"SIG{self.plan.signal}"]

    # -- its end -------------------------------------------------------------------------------

    def end_of(self, report: RankReport, rank: int) -> Ended:
        """The end of a rank, from its supervisor's report and, of main, its own verdict."""
        if self.exec is None:
            ending = self._end_of_main(report, rank)
        else:
            ending = Ending.of_command(report, self.exec, self.plan.actions)
        return report.time, replace(ending, rank=rank, node=report.node)

    def end_without_report(self, code: int, text: str = "") -> Ending:
        """The end of a rank whose supervisor could not write a report.

        Args:
            code: The exit code of the process that started the supervisor, -N for signal N.
            text: What has happened, for people.
        """
        ending = Ending.of(code, text=text, is_command=not self.is_main)
        is_signalled = code == ExitCode.REQUEUE or code > 128
        return ending.imposed(Reason.signalled) if is_signalled and not self.is_main else ending

    def _end_of_main(self, report: RankReport, rank: int) -> Ending:
        code, said = report.code, verdict.read(self.directory, rank)
        if code == ExitCode.FINISHED and not self._has_returned(said, rank):
            return Ending.of(1, text="ended with code 0 before main had returned (os._exit, fork?)")
        if code == ExitCode.UNHEALTHY and (found := node_fault.read(self.directory, rank)):
            return Ending.of(code, found.reason, found.text)
        if said is not None and said.exit_code == code:
            return Ending.of(code, said.reason, said.text, is_held=report.is_held)
        return Ending.of(
            code,
            is_held=report.is_held,
            oom_kills=report.oom_kills,
            memory_bytes=report.memory_bytes,
        )

    def _has_returned(self, said: Verdict | None, rank: int) -> bool:
        """Whether main returned, or its training finished."""
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
