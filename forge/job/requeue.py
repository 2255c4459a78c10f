"""Whether a job is started again after an attempt has ended, within the policy's limits.

Standard library only: this runs in the job's wrapper, outside containers and environments.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from forge.errors import Reason
from forge.job.ending import Ending
from forge.jobdir.job_state import Counts
from forge.jobdir.plan import RequeueLimits


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
BUDGETS = {
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
    counts.out_of_memory = counts.out_of_memory + 1 if ending.reason is Reason.out_of_memory else 0
    is_brief = ending.reason is Reason.requested and not has_run and took_s < _BRIEF_S
    counts.brief = counts.brief + 1 if is_brief else 0
    if ending.reason in (Reason.finished, Reason.interrupted, Reason.cancelled, Reason.orphaned):
        return Decision(starts_again=False, because=what)
    budgets = BUDGETS | (_ELSEWHERE if limits.has_other_nodes else {})
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
    if counts.out_of_memory > 1:
        given_up = "memory ran out twice in a row, and the next attempt would have no more"
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
