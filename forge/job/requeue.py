"""Why an attempt ended, and whether the job is started again, within the policy's limits.

Standard library only: this runs in the job's wrapper, outside containers and environments.
"""

from __future__ import annotations

import math
import random
import signal
from dataclasses import dataclass, replace
from typing import Any

from forge.errors import ExitCode, Reason
from forge.jobdir.job_state import Counts, State
from forge.jobdir.plan import ExecPlan, RequeueLimits

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
    hung_at: int | None = None
    """Number of steps at the hang for which the wrapper ended the attempt."""
    rank: int = 0
    """The rank that ended the attempt: its output and its exception show the cause."""

    @classmethod
    def of(
        cls,
        code: int,
        reported: Reason | None = None,
        text: str = "",
        *,
        is_held: bool = False,
        oom_kills: int = 0,
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
            is_command: As the field.
        """
        of_memory = ""
        if oom_kills:
            processes = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
            of_memory = f"; memory ran out, and the kernel killed {processes} in the task's cgroup"
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
    def of_command(cls, report: dict[str, Any], how: ExecPlan, actions: dict[str, str]) -> Ending:
        """The end of a command, from its supervisor's report.

        Args:
            report: The exit code, and the signals that asked the command to stop.
            how: The plan of the command.
            actions: Signal -> action, from the policy.
        """
        code, stops, killed = report["code"], report.get("stops", []), report.get("oom_kills", 0)
        ending = cls.of(code, is_held=report["is_held"], oom_kills=killed, is_command=True)
        if not stops or (ending.is_finished and how.is_zero_finished):
            return ending
        is_requeue = actions.get(stops[0]) == "requeue"
        return ending.imposed(Reason.requested if is_requeue else Reason.signalled)

    def imposed(self, reason: Reason, text: str = "") -> Ending:
        """The end of this attempt if something outside of the task has ended it.

        A task that has finished stays finished. A command that was asked to stop does not, since
        its exit code 0 can mean that it has saved.

        Args:
            reason: Why it was ended.
            text: The reason for people; empty: that of `reason`.
        """
        is_asked = self.is_command and reason is not Reason.crashed
        if self.is_finished and not is_asked:
            return self
        if self.is_held and self.code != ExitCode.FINISHED:
            text = _HELD
        elif is_asked:
            ended = f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)
            text = f"{reason.value} (the command ended with {ended})"
        return replace(self, reason=reason, text=text or reason.value, is_imposed=True)

    @property
    def is_finished(self) -> bool:
        """Whether the task has finished its work."""
        return self.reason is Reason.finished

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
        code = self.code if self.code >= 0 else 128 - self.code
        return code if code or self.is_finished else int(ExitCode.TERMINATED)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Decision:
    """Whether the job starts again, and the reason."""

    starts_again: bool
    because: str
    """The reason for people, with the limit of the policy that was reached, if any."""
    pause_s: float = 0.0
    """Seconds to wait before the next start."""


_PREEMPTIONS = ("preemptions", "max_preemptions", "requeue.max_preemptions")
_FAILURES = ("failures", "max_failures", "requeue.max_failures")
_BUDGETS = {
    Reason.preempted: _PREEMPTIONS,
    Reason.node_failed: _PREEMPTIONS,
    Reason.requested: _PREEMPTIONS,
    Reason.signalled: _PREEMPTIONS,
    Reason.time_limit: ("timeouts", "max_timeouts", "requeue.max_timeouts"),
    Reason.forced: _FAILURES,
    Reason.crashed: _FAILURES,
    Reason.out_of_memory: _FAILURES,
    Reason.rank_lost: _FAILURES,
    Reason.disk_full: _FAILURES,
    Reason.hung: ("hangs", "max_hangs", "hang.max_restarts"),
}
"""Reason -> its field in `Counts`, its limit in the plan, and the key of that limit."""
_ELSEWHERE = {Reason.unhealthy: ("excluded", "max_excluded_nodes", "health.max_excluded_nodes")}
"""Reasons to start the job only if it can get other nodes."""


BY_CLUSTER = (Reason.preempted, Reason.node_failed, Reason.time_limit)
"""Reasons that are not the job's fault."""
MAX_CUT_SHORT = 10
"""Restarts in a row of attempts that the cluster ended before they could save: as many as the
default of `requeue.max_failures`, with pauses that grow from `_PAUSE_S` to 15 minutes."""
_PAUSE_S, _MAX_PAUSE_S = 30.0, 900.0
_BRIEF_S, _BRIEF_PAUSE_S = 30.0, 1.0
"""Seconds; an attempt that asks to be run again sooner has found nothing to do."""


def decide_restart(
    ending: Ending,
    counts: Counts,
    limits: RequeueLimits,
    saved_step: int,
    *,
    has_run: bool = True,
    is_cut_short: bool = False,
    took_s: float = math.inf,
) -> Decision:
    """Decide whether the job starts again, and update `counts`.

    Args:
        ending: The end of the attempt.
        counts: The restarts and failures so far.
        limits: The limits of the job's plan.
        saved_step: The number of saved steps, from `ledger.saved_steps`.
        has_run: Whether the job has a `forge.Run`; if not, missing progress does not count.
        is_cut_short: Whether the attempt ended before its first boundary, or half its time.
        took_s: Duration of the attempt, in seconds.
    """
    what = ending.text
    is_evicted_early = is_cut_short and ending.reason in BY_CLUSTER
    if saved_step > counts.best_step:
        counts.no_progress = counts.early_evictions = 0
    elif is_evicted_early:
        counts.early_evictions += 1
    elif ending.reason is not Reason.disk_full:  # on a full disk no attempt can save
        counts.no_progress += 1
    counts.best_step = max(counts.best_step, saved_step)
    is_brief = ending.reason is Reason.requested and not has_run and took_s < _BRIEF_S
    counts.brief = counts.brief + 1 if is_brief else 0
    if ending.reason in (Reason.finished, Reason.interrupted, Reason.cancelled, Reason.orphaned):
        return Decision(starts_again=False, because=what)
    budgets = _BUDGETS | (_ELSEWHERE if limits.has_other_nodes else {})
    counter, limit, key = budgets.get(ending.reason, ("", "", ""))
    is_ruled = not counter and counts.recovery is None  # rules apply to the job's own command
    rule = _rule_for(ending, limits) if is_ruled else None
    if not counter and rule is None:
        return Decision(starts_again=False, because=what)
    if limits.is_up_to_site and ending.reason in (Reason.preempted, Reason.node_failed):
        counts.restarts += 1  # Slurm requeues it, and no one else counts that
        return Decision(starts_again=True, because=what)
    if not limits.enabled:
        return Decision(starts_again=False, because=f"{what}; {limits.why_not}")
    if ending.reason is Reason.hung and limits.is_hang_final:
        return Decision(starts_again=False, because=f"{what}; `resilience.hang.action=halt`")
    given_up = _same_hang(ending, counts)
    given_up = given_up or (_without_progress(counts, limits) if has_run else "")
    if given_up:
        return Decision(starts_again=False, because=f"{what}; given up: {given_up}")
    if rule is not None:
        used = counts.by_rule.get(str(rule), 0)
        most = limits.rules[rule].max_restarts
        if used >= most:
            key = f"resilience.requeue.rules[{rule}].max_restarts"
            return Decision(starts_again=False, because=f"{what}; given up: `{key}={most}`")
        counts.by_rule[str(rule)] = used + 1
        if limits.rules[rule].recover:
            counts.recovery = {"rule": rule, "code": ending.code}
    else:
        used, most = getattr(counts, counter), getattr(limits, limit)
        if most is not None and used >= most:
            return Decision(
                starts_again=False, because=f"{what}; given up: `resilience.{key}={most}`"
            )
        setattr(counts, counter, used + 1)
    counts.restarts += 1
    # The first time can be chance. After that, pause: the cluster ends every attempt early.
    pauses, first_s = counts.early_evictions - 1 if is_evicted_early else 0, _PAUSE_S
    if ending.reason is Reason.disk_full:
        pauses = counts.failures
    elif is_brief:
        pauses, first_s = counts.brief - 1, _BRIEF_PAUSE_S
    pause_s = first_s * 2.0 ** min(pauses - 1, 10) if pauses > 0 else 0.0
    return Decision(starts_again=True, because=what, pause_s=min(pause_s, _MAX_PAUSE_S))


def spread(decision: Decision, job: str, restarts: int) -> Decision:
    """The decision with a pause up to 50 % longer, which differs for each job and restart.

    Otherwise, jobs that ended together would start together. Also, slurmctld checks time limits
    every 30 s: a job that starts at a multiple of that always gets its signal a minute early.
    """
    longer = 1 + random.Random(f"{job} {restarts}").random() / 2
    return replace(decision, pause_s=decision.pause_s * longer)


def _same_hang(ending: Ending, counts: Counts) -> str:
    """The reason why a repeated hang ends the job, else empty. Updates `counts`."""
    if ending.hung_at is None:
        return ""
    # The section is not compared: next time, another of the waiting ranks can be the culprit.
    before, counts.last_hang = counts.last_hang, [ending.hung_at, counts.best_step]
    if before != counts.last_hang:
        return ""
    return f"it hung at step {ending.hung_at} twice, and saved nothing new in between"


def _without_progress(counts: Counts, limits: RequeueLimits) -> str:
    """The reason why attempts that saved nothing new end the job; empty if they do not."""
    if counts.no_progress >= limits.max_no_progress:
        return (
            f"{counts.no_progress} attempts in a row saved nothing new"
            f" (`resilience.requeue.max_no_progress={limits.max_no_progress}`)"
        )
    if counts.early_evictions > MAX_CUT_SHORT:
        return (
            f"the cluster ended {counts.early_evictions} attempts in a row before they could save"
            f" anything: the limit is {MAX_CUT_SHORT}"
        )
    return ""


def _rule_for(ending: Ending, limits: RequeueLimits) -> int | None:
    """The first rule that names this exit code and this reason."""
    for number, rule in enumerate(limits.rules):
        has_code = not rule.exit_codes or ending.code in rule.exit_codes
        if has_code and rule.reason in (None, ending.reason.name):
            return number
    return None
