"""Why jobs wait in the queue: Slurm's reason at each change, and whether somebody has to act.

Source: squeue(1), "JOB REASON CODES"; the names of 22.05 and later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forge.slurm.job_info import is_held

_STUCK = re.compile(
    "DependencyNeverSatisfied|BadConstraints|DeadLine|Reservation(Deleted|Invalid)"
    "|Partition(Down|Inactive|TimeLimit|NodeLimit)|NodeDown|ReqNodeNotAvail(?!.*[Rr]eserved).*"
    "|Invalid(Account|QOS)|(Account|QOS)NotAllowed"
    "|(Assoc|QOS)(Max|Min).*(PerJob|PerNode|NotSatisfied).*|MaxMemPerLimit"
    "|(Association|QOS)(Resource|Time)Limit"
    "|(Assoc|QOS)Grp(Wall|.*(?<!Run)Minutes).*|QOSUsageThreshold"
)
"""Reasons that do not pass when other jobs end: somebody has to change the job or the cluster."""
_PASSING = ("Priority", "Resources")
"""Slurm alternates between these while a job waits for its turn."""
_SHOWN = 6
"""Slurm's numbers of jobs that a line names."""


def is_stuck(reason: str) -> bool:
    """Whether a reason, as squeue prints it, does not end by itself."""
    return is_held(reason) or _STUCK.fullmatch(reason) is not None


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
            line = f"job{'s' * (len(jobs) > 1)} {ranges(numbers)} waiting: {reason}"
            if is_stuck(reason):
                ids = " ".join(slurm_id for _, slurm_id in jobs[:_SHOWN])
                ids += " …" * (len(jobs) > _SHOWN)
                remedy = f"`scancel {ids}`, and run the sweep's command again with other options"
                if is_held(reason):
                    remedy = f"`scontrol release {ids}` lets Slurm start them"
                line += f", which does not end by itself: {remedy}."
            lines.append((line, is_stuck(reason)))
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
