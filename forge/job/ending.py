"""Why an attempt ended: one reason, for the decision whether the job starts again.

Standard library only: this runs in the job's wrapper, outside containers and environments.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from forge import messages
from forge.errors import ExitCode, Reason
from forge.jobdir import job_state
from forge.jobdir.job_state import State
from forge.jobdir.plan import ExecPlan
from forge.jobdir.rank_report import RankReport

_EXPLAINED = (*(Reason.halted, Reason.unhealthy, Reason.io_error), *(Reason.failed, Reason.hung))
"""Reasons for which the task's own text says more than the reason."""
_DETAILED: dict[int, tuple[Reason, ...]] = {
    ExitCode.REQUEUE: (Reason.time_limit,),
    ExitCode.FORCED: (Reason.rank_lost, Reason.hung),
    ExitCode.UNHEALTHY: (Reason.halted,),
}
"""Exit code -> the reasons that a task can report with it, which say more than the code."""
_HELD = "stopping took longer than `shutdown.timeout_s`, and the task was killed"


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: why, and in which state the job is if it is not started again."""

    reason: Reason
    code: int
    """The task's exit code, or -N if signal N killed it."""
    text: str
    """The reason for people, perhaps with details."""
    is_imposed: bool = False
    """Whether the wrapper, Slurm or a person ended the attempt; else it ended by itself."""
    is_held: bool = False
    """Whether the supervisor had to kill the task, which had not exited by its deadline."""
    is_command: bool = False
    """Whether it was a command without forge: only its exit codes 0 and 75 have a meaning."""
    is_certain: bool = False
    """Whether a command has finished in spite of a signal; else its exit code 0 can mean that it
    has saved."""
    hung_at: int | None = None
    """Number of steps at the hang for which the wrapper ended the attempt."""
    rank: int = 0
    """The rank that ended the attempt: its output and its exception show the cause."""
    node: str = ""
    """The node of that rank, by Slurm's name; empty if it is not known, or on one machine."""

    @classmethod
    def of(
        cls,
        code: int,
        reported: Reason | None = None,
        text: str = "",
        *,
        is_held: bool = False,
        oom_kills: int = 0,
        memory_bytes: int | None = None,
        is_command: bool = False,
    ) -> Ending:
        """The end of a task that ended by itself.

        Args:
            code: As the field.
            reported: The reason that the task itself reported; None if it reported nothing.
            text: The text that the task reported.
            is_held: As the field.
            oom_kills: Processes that the kernel's OOM killer killed meanwhile, by the count of the
                job's cgroup. It does not show which processes they were.
            memory_bytes: Memory that they could use at most; None if it is not known.
            is_command: As the field.
        """
        of_memory = ""
        if oom_kills:
            processes = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
            most = "" if memory_bytes is None else f", which can use {messages.size(memory_bytes)}"
            of_memory = (
                f"; memory ran out, and the kernel killed {processes} in the task's cgroup{most}"
            )
        if is_held and code != ExitCode.FINISHED:
            reason, text = Reason.forced, _HELD
        elif code < 0:
            is_out_of_memory = code == -signal.SIGKILL and oom_kills > 0
            reason = Reason.out_of_memory if is_out_of_memory else Reason.crashed
            text = text or f"killed by {signal_name(-code)}{of_memory}"
        else:
            has_meaning = not is_command or code in (ExitCode.FINISHED, ExitCode.REQUEUE)
            reason = Reason.of_code(code) if has_meaning else Reason.failed
            if reported is not None and reported in _DETAILED.get(code, ()):
                reason = reported
            shown = f"exit code {code}{of_memory}" if reason is Reason.failed else reason.value
            text = text if text and reason in _EXPLAINED else shown
        return cls(reason, int(code), text, is_held=is_held, is_command=is_command)

    @classmethod
    def of_command(cls, report: RankReport, how: ExecPlan, actions: dict[str, str]) -> Ending:
        """The end of a command.

        Args:
            report: The supervisor's report.
            how: The plan of the command.
            actions: Signal -> action, from the policy.
        """
        ending = cls.of(
            report.code,
            is_held=report.is_held,
            oom_kills=report.oom_kills,
            memory_bytes=report.memory_bytes,
            is_command=True,
        )
        is_done = report.is_done if how.done_file else how.is_zero_finished
        if ending.is_finished and is_done:
            return replace(ending, is_certain=True)
        if ending.is_finished and how.done_file:
            text = f"exit code 0 without `resilience.exec.done_file={how.done_file}`"
            ending = replace(ending, reason=Reason.requested, text=text)
        if not report.stops:
            return ending
        is_requeue = actions.get(report.stops[0]) == "requeue"
        return ending.imposed(Reason.requested if is_requeue else Reason.signalled)

    def imposed(self, reason: Reason, text: str = "") -> Ending:
        """The end of this attempt if something outside of the task has ended it.

        A task that has finished stays finished. A command that was asked to stop does not, unless
        that is certain.

        Args:
            reason: Why it was ended.
            text: The reason for people; empty: that of `reason`.
        """
        is_asked = self.is_command and reason is not Reason.crashed
        if self.has_finished_anyway or (self.is_finished and not is_asked):
            return self
        if self.is_held and self.code != ExitCode.FINISHED:
            text = _HELD
        elif is_asked:
            ended = f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)
            text = f"{text or reason.value} (the command ended with {ended})"
        return replace(self, reason=reason, text=text or reason.value, is_imposed=True)

    @property
    def is_finished(self) -> bool:
        """Whether the task has finished its work."""
        return self.reason is Reason.finished

    @property
    def has_finished_anyway(self) -> bool:
        """Whether it has finished, even if somebody has signalled it meanwhile."""
        return self.is_finished and (self.is_certain or not self.is_command)

    def can_be_by(self, number: int) -> bool:
        """Whether the task can have stopped because of a signal: the supervisor of a command knows.

        Main dies of a signal that comes while it is importing, or about to exit.
        """
        if self.is_command:
            return self.is_imposed
        stops = (ExitCode.REQUEUE, ExitCode.FORCED, 128 + number, -number)
        return self.is_held or self.code in stops

    @property
    def state(self) -> State:
        """The state of the job if it is not started again."""
        if self.is_finished:
            return State.finished
        if self.is_command and self.is_imposed and self.reason is not Reason.crashed:
            return State.terminated
        stops = (Reason.interrupted, Reason.cancelled, Reason.orphaned)
        return State.stopped if self.reason in stops else State.failed

    @property
    def ended_as(self) -> str:
        """The state of the attempt: as `state`, unless a command asks to be run again."""
        is_asking = self.is_command and not self.is_imposed and self.reason is Reason.requested
        return "checkpointed" if is_asking else self.state.name

    @property
    def exit_code(self) -> int:
        """The exit code of the job's own process: 0 only if the job has finished."""
        return job_state.exit_code(self.code, is_finished=self.is_finished)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
