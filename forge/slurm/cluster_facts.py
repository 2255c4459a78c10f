"""Effects of a cluster's configuration on a job: at a preemption, a time limit, a lost node.

The words are those of slurm.conf(5); each effect was measured on Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from forge.slurm import job_info

Fields = Mapping[str, str]
_KILL_WAIT_S = 30.0


@dataclass(frozen=True)
class Fact:
    """An effect of the cluster's configuration on a job."""

    topic: str
    text: str
    remedy: str = ""
    """The config that helps; empty if none is needed."""


def facts(settings: Fields, partitions: Mapping[str, Fields]) -> Iterator[Fact]:
    """The effects, from `scontrol show config` and `scontrol show partition`.

    Args:
        settings: The cluster's configuration, by the names of slurm.conf.
        partitions: Name -> fields of each partition.
    """
    kill_wait_s = _seconds(settings.get("KillWait", ""), _KILL_WAIT_S)
    each = partitions.items()
    yield from _merged((name, _preemption(fields, settings, kill_wait_s)) for name, fields in each)
    yield from _merged((name, _time_limit(fields, kill_wait_s)) for name, fields in each)
    yield _node_failure(settings)


def _merged(found: Iterable[tuple[str, Fact]]) -> Iterator[Fact]:
    """One fact for all partitions that have the same one."""
    names: dict[Fact, list[str]] = {}
    for name, fact in found:
        names.setdefault(fact, []).append(name)
    for fact, some in names.items():
        yield replace(fact, topic=f"{fact.topic} ({', '.join(some)})")


def _preemption(fields: Fields, settings: Fields, kill_wait_s: float) -> Fact:
    kind = settings.get("PreemptType", "preempt/none")
    mode = fields.get("PreemptMode") or settings.get("PreemptMode", "OFF")
    if "none" in kind or mode.startswith("OFF"):
        return Fact("preemption", "Jobs are not preempted.")
    if "qos" in kind:
        return Fact(
            "preemption",
            "Whether and how jobs are preempted depends on their QOS: `sacctmgr show qos"
            " format=name,preemptmode,gracetime`.",
        )
    if "SUSPEND" in mode or "GANG" in mode:
        return Fact(
            "preemption",
            f"A preempted job is suspended (PreemptMode={mode}) and continues later. forge does not"
            " take the pause for a hang.",
        )
    grace_s = _seconds(fields.get("GraceTime", ""), 0.0)
    total_s = grace_s + kill_wait_s
    notice = f"GraceTime={grace_s:g} s and KillWait={kill_wait_s:g} s"
    text = f"A preempted job gets SIGTERM, and SIGKILL {total_s:g} s later ({notice})."
    if "REQUEUE" in mode:
        text += " Slurm requeues the job."
    else:
        text += f" Slurm would end the job (PreemptMode={mode}): forge requeues it after the save."
    if "send_user_signal" in settings.get("PreemptParameters", ""):
        text += " Slurm sends the signal of `--signal`, too; forge stops at either."
    often = "" if grace_s else " A save that takes longer is lost, so save often."
    return Fact(
        "preemption",
        text,
        f"Set `resilience.shutdown.timeout_s` to at most {total_s:g}.{often}",
    )


def _time_limit(fields: Fields, kill_wait_s: float) -> Fact:
    most = fields.get("MaxTime", "UNLIMITED")
    longest = "" if job_info.seconds(most) is None else f" of at most {most}"
    return Fact(
        "time limit",
        f"At its limit{longest} a job gets SIGTERM, and SIGKILL {kill_wait_s:g} s later"
        " (KillWait); `--requeue` has no effect then. forge lets Slurm send a signal"
        " `resilience.signal.warning_s` before the limit (up to a minute earlier), saves, and"
        " requeues the job.",
        "A training longer than the limit continues after each requeue: a short limit often starts"
        " sooner.",
    )


def _node_failure(settings: Fields) -> Fact:
    timeout = settings.get("SlurmdTimeout", "300 sec")
    if settings.get("JobRequeue", "1").startswith("0"):
        return Fact(
            "lost node",
            f"A node that does not answer for SlurmdTimeout={timeout} is lost. JobRequeue=0: Slurm"
            " ends its jobs, unless they were submitted with `--requeue`, as forge does.",
            "In a batch script of your own, add `#SBATCH --requeue`.",
        )
    return Fact(
        "lost node",
        f"A node that does not answer for SlurmdTimeout={timeout} is lost; Slurm requeues its jobs"
        " (JobRequeue=1), which resume from their last checkpoint.",
    )


def _seconds(text: str, default: float) -> float:
    match = re.match(r"\d+", text)
    return float(match[0]) if match else default
