"""The answer of the controller about a job: its fields, and why Slurm ends the job.

Standard library only: this runs in the batch script, outside containers. Source: scontrol(1).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from enum import Enum

from forge.errors import Reason


class Why(Enum):
    """Why a job is being stopped."""

    preempted = "preempted"
    time_limit = "time limit"
    cancelled = "cancelled"
    requeued = "already requeued by Slurm"
    out_of_memory = "memory ran out"
    node_failed = "a node failed"
    script_killed = "its batch script was killed"
    unknown = "unknown"
    """Slurm gives no reason: somebody sent the signal by hand."""


IMPOSED = {
    Why.cancelled: Reason.cancelled,
    Why.preempted: Reason.preempted,
    Why.requeued: Reason.preempted,
    Why.time_limit: Reason.time_limit,
    Why.out_of_memory: Reason.out_of_memory,
    Why.node_failed: Reason.node_failed,
}
"""Why Slurm stops a job -> the reason why its attempt ended."""


class Stage(Enum):
    """The stage of a job, by its state in Slurm."""

    waiting = "waiting"
    running = "running"
    ending = "ending"
    """The job has ended, but not all of its processes."""
    ended = "ended"


_HELD = ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_WAITING = ("PENDING", "CONFIGURING", "EXPEDITING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED")
_RUNNING = ("RUNNING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED", "UPDATE_DB")
_FAILED = ("FAILED", "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED")
STATES: dict[str, tuple[Stage, Why]] = {
    **dict.fromkeys((*_WAITING, *_HELD), (Stage.waiting, Why.unknown)),
    **dict.fromkeys(_RUNNING, (Stage.running, Why.unknown)),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), (Stage.ending, Why.unknown)),
    **dict.fromkeys(("COMPLETED", *_FAILED), (Stage.ended, Why.unknown)),
    **dict.fromkeys(("BOOT_FAIL", "NODE_FAIL"), (Stage.ended, Why.node_failed)),
    "CANCELLED": (Stage.ended, Why.cancelled),
    "OUT_OF_MEMORY": (Stage.ended, Why.out_of_memory),
    "PREEMPTED": (Stage.ended, Why.preempted),
    "TIMEOUT": (Stage.ended, Why.time_limit),
}
"""All states of squeue(1), "JOB STATE CODES", up to Slurm 25.11: what each means, and why the job
has ended, if the state says it."""


def stage_of(state: str) -> Stage:
    """The stage of a job; one in a state that forge does not know has not ended."""
    return STATES.get(state, (Stage.running, Why.unknown))[0]


def cause_of(state: str, reason: str = "") -> Why:
    """Why a job has ended, by its state, or by its reason while the state is COMPLETING."""
    by_reason = {"TimeLimit": Why.time_limit, "OutOfMemory": Why.out_of_memory}
    return by_reason.get(reason) or STATES.get(state, (Stage.running, Why.unknown))[1]


def is_held(word: str) -> bool:
    """Whether a state or a reason says that a person has to release the job."""
    return word in _HELD or re.search("[Hh]eld|JobHold", word) is not None


FINAL = (Reason.halted, Reason.unhealthy, Reason.in_use, Reason.bad_config)
"""Reasons of a task's own, after which another start would end alike, whatever Slurm does."""


@dataclass(frozen=True)
class JobInfo:
    """The fields of `scontrol show job` that forge needs."""

    state: str
    """JobState: RUNNING, COMPLETING, PENDING, CANCELLED, …"""
    reason: str
    restarts: int
    preempt_time: str | None
    """When the job was preempted; None if it was not."""
    left_s: float | None = None
    """Seconds until the time limit, by the controller's clock; None without a limit."""
    excluded: str = ""
    """ExcNodeList: the nodes on which the job must not run."""
    required: str = ""
    """ReqNodeList: the nodes that the job must get."""
    features: str = ""
    """The features that its nodes must have (`--constraint`)."""
    gres: frozenset[str] = frozenset()
    """Names of the generic resources that its nodes must have, such as gpu."""
    end_time: str = ""
    """When the job ended, or will end if it is running."""
    partition: str = ""
    is_requeueable: bool = True
    """Whether Slurm allows a requeue (Requeue=1)."""
    is_batch: bool = False
    """Whether sbatch started the job, and not salloc or srun."""
    script: str = ""
    """Path and arguments of its batch script; empty without a script."""
    work_dir: str = ""
    """The working directory of the batch script."""
    memory: str = ""
    """The memory of the job, in Slurm's notation, such as 4G."""
    script_signal: int = 0
    """The signal that ended its batch script, or its cancel; 0: none."""

    @staticmethod
    def parse(text: str) -> JobInfo:
        """Parse one line of `scontrol --oneliner show job`."""
        # The name and the last fields (comment, command) are free text that can look like a field.
        text = re.sub(r" JobName=.*? UserId=", " UserId=", text, count=1, flags=re.DOTALL)
        fields: dict[str, str] = {}
        script = re.search(r" Command=(.*?) WorkDir=(.*?) StdErr=", text)
        for word in text.split():
            name, is_field, value = word.partition("=")
            if is_field:
                fields.setdefault(name, "" if value == "(null)" else value)
        gres = " ".join(value for name, value in fields.items() if name.startswith("TresPer"))
        preempt_time = fields.get("PreemptTime", "None")
        limit_s, run_s = seconds(fields.get("TimeLimit", "")), seconds(fields.get("RunTime", ""))
        return JobInfo(
            state=fields.get("JobState", ""),
            reason=fields.get("Reason", ""),
            restarts=int(fields.get("Restarts", 0)),
            preempt_time=None if preempt_time in ("None", "N/A", "") else preempt_time,
            left_s=None if limit_s is None or run_s is None else limit_s - run_s,
            excluded=fields.get("ExcNodeList", ""),
            required=fields.get("ReqNodeList", ""),
            features=fields.get("Features", ""),
            gres=frozenset(re.findall(r"gres[:/](\w+)", gres)),
            end_time=fields.get("EndTime", ""),
            partition=fields.get("Partition", ""),
            is_requeueable=fields.get("Requeue", "1") != "0",
            is_batch=fields.get("BatchFlag") == "1",
            script=script[1] if script and os.path.isabs(script[1]) else "",
            work_dir=script[2] if script else "",
            memory="".join(re.findall(r" (?:Alloc)?TRES=\S*?mem=(\w+)", text)[:1]),
            script_signal=int(fields.get("ExitCode", "").partition(":")[2] or 0),
        )

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended; some of its processes can still be running."""
        return stage_of(self.state) in (Stage.ending, Stage.ended)

    @property
    def is_script_killed(self) -> bool:
        """Whether a signal has ended its batch script, of which the job died; a cancel has none."""
        return self.has_ended and self.script_signal != 0 and self.reason not in ("", "None")

    def ends_in_s(self) -> float | None:
        """Seconds until Slurm ends the job, at its limit or after the grace time; None if unknown.

        EndTime covers both, by the controller's clock.
        """
        with contextlib.suppress(ValueError):  # Unknown
            end = time.mktime(time.strptime(self.end_time, "%Y-%m-%dT%H:%M:%S")) - time.time()
            return end if self.left_s is None else min(end, self.left_s)
        return self.left_s

    @property
    def is_preempted_at_end(self) -> bool:
        """Whether a preemption ended the job, and not a cancel during the grace time.

        Slurm sets PreemptTime when the grace time begins, and again when it ends the job. If the
        job is cancelled in between, PreemptTime is earlier than the end.
        """
        has_both = bool(self.preempt_time and self.end_time)
        return has_both and str(self.preempt_time) >= self.end_time


def seconds(text: str) -> float | None:
    """Slurm's `[days-]hours:minutes:seconds` in seconds; None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    try:
        hours, minutes, rest = (int(part) for part in clock.split(":"))
        return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest)
    except ValueError:
        return None
