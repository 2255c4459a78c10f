"""Why a job waits in the queue: Slurm's reason, and what to do if the job would wait forever.

Most reasons pass when other jobs end. For the rest somebody has to act, so forge prints a hint.
Source: squeue(1), "JOB REASON CODES"; the names of 22.05 and later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_RELEASE = "`scontrol release {jobs}` releases it"
_ANEW = "`scancel {jobs}`, and start the sweep again"
_STUCK = {
    "DependencyNeverSatisfied": "the condition in `hydra.launcher.dependency` can no longer"
    f" become true. {_ANEW} without it, or with another",
    "JobHeldUser": f"held by hand. {_RELEASE}",
    "JobHeldAdmin|.*requeued.held": "held by an administrator, or by Slurm itself. Ask an"
    f" administrator; {_RELEASE} if it was Slurm",
    "JobHoldMaxRequeue": f"requeued too often, and held by Slurm. {_RELEASE}",
    "PartitionDown|PartitionInactive": "the partition starts no jobs until an administrator opens"
    " it. Ask them, or choose another: `scontrol update JobId=<job> Partition=<name>`"
    " (jobs: {jobs})",
    "PartitionTimeLimit|PartitionNodeLimit": "it requests more time or nodes than the partition"
    " allows."
    f" {_ANEW} with a lower `hydra.launcher.timeout_min` or `nodes`",
    "BadConstraints": "no node has the requested features or resources"
    f" (`hydra.launcher.constraint`, `gres`, `nodelist`, `exclude`, …). {_ANEW} with other options",
    "NodeDown|ReqNodeNotAvail(?!.*[Rr]eserved).*": "a required node is down or drained:"
    f" `sinfo -R` says why. Wait for it, or {_ANEW} with another `hydra.launcher.nodelist`",
    "ReservationDeleted|ReservationInvalid": "the reservation does not exist any more."
    f" {_ANEW} without it",
    "Invalid(Account|QOS)|(Account|QOS)NotAllowed": "you have no access to this account or QOS."
    f" {_ANEW} with another `hydra.launcher.account`, `qos` or `partition`",
    "(Assoc|QOS)(Max|Min).*(PerJob|PerNode|NotSatisfied).*|MaxMemPerLimit"
    "|Association(Resource|Time)Limit|QOS(Resource|Time)Limit": "it requests more than the account"
    f" or the QOS allows for one job. {_ANEW} with other options",
    "(Assoc|QOS)Grp(Wall|.*(?<!Run)Minutes).*|QOSUsageThreshold": "the budget of the account or"
    " the QOS is used up. Have it raised, or choose another:"
    " `scontrol update JobId=<job> Account=<name>` (jobs: {jobs})",
    "DeadLine": f"the deadline can no longer be met. {_ANEW} without it",
}
"""Reasons, as regular expressions, that do not end by themselves -> why, and what to do."""
_PASSING = ("Priority", "Resources")
"""Slurm alternates between these while a job waits for its turn."""
_SHOWN = 6


def advice(reason: str, jobs: Sequence[str]) -> str:
    """What to do about a reason that does not end by itself; empty for any other reason.

    Args:
        reason: The reason as squeue prints it.
        jobs: Slurm's numbers of the jobs that wait for this reason.
    """
    for pattern, text in _STUCK.items():
        if re.fullmatch(pattern, reason):
            more = " …" if len(jobs) > _SHOWN else ""
            return text.replace("{jobs}", " ".join(jobs[:_SHOWN]) + more)
    return ""


@dataclass
class Told:
    """The reasons that were printed for waiting jobs, so that each change is printed once."""

    _last: dict[int, str] = field(default_factory=dict)
    """Hydra's number of a job -> the reason that was printed last."""

    def news(self, waiting: Iterable[tuple[int, str, str]]) -> list[tuple[str, bool]]:
        """A line for each reason that has changed, and whether somebody has to act.

        `waiting`: (number, Slurm's number, reason) of each job; no reason: it no longer waits.
        """
        changed: dict[str, list[tuple[int, str]]] = {}
        for number, slurm_id, reason in waiting:
            last = self._last.get(number, "")
            self._last[number] = reason
            is_passing = last in _PASSING and reason in _PASSING
            if reason and reason not in ("None", last) and not is_passing:
                changed.setdefault(reason, []).append((number, slurm_id))
        lines = []
        for reason, jobs in changed.items():
            numbers = [number for number, _ in jobs]
            act = advice(reason, [slurm_id for _, slurm_id in jobs])
            what = f"job{'s' * (len(jobs) > 1)} {ranges(numbers)} waiting: {reason}"
            lines.append(
                (f"{what}, which does not end by itself: {act}." if act else what, bool(act))
            )
        return lines


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
