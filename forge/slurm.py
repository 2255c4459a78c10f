"""What Slurm knows of a job, and what is asked of it: the only caller of Slurm's commands.

A signal alone cannot tell a preemption from a cancel: both are SIGCONT and SIGTERM. So the
controller is asked. Standard library only: this runs in the batch script, outside containers.
Source: scontrol(1); the table of `why` was measured on Slurm 22.05.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

_CALL_S = 10.0
"""One question may take so long; a busy controller answers in seconds."""
_FIRST_PAUSE_S = 0.2


class Why(Enum):
    """Why a job is being stopped."""

    preempted = "preempted"
    time_limit = "time limit"
    cancelled = "cancelled"
    requeued = "already requeued by Slurm"
    unknown = "unknown"
    """Slurm has no reason: somebody sent the signal by hand."""


@dataclass(frozen=True)
class JobInfo:
    """The fields of `scontrol show job` that decide."""

    state: str
    """JobState: RUNNING, COMPLETING, PENDING, CANCELLED, …"""
    reason: str
    restarts: int
    preempt_time: str | None
    """When it was preempted; None where it was not."""

    @staticmethod
    def parse(text: str) -> JobInfo:
        """From one line of `scontrol --oneliner show job`."""
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        preempt_time = fields.get("PreemptTime", "None")
        return JobInfo(
            state=fields.get("JobState", ""),
            reason=fields.get("Reason", ""),
            restarts=int(fields.get("Restarts", 0)),
            preempt_time=None if preempt_time in ("None", "N/A", "") else preempt_time,
        )


class NoAnswer(Exception):
    """The controller did not answer in time."""


class NoSuchJob(Exception):
    """The controller does not know the job (any more)."""


def own_job(environment: Mapping[str, str]) -> str:
    """The name of this process's job for scontrol.

    One task of every array has the array's own number as its SLURM_JOB_ID: asked by that, scontrol
    would mean all of them.
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def show(job: str, within_s: float) -> JobInfo:
    """Ask the controller, again and again if it is too busy to answer.

    Args:
        job: As `own_job` has it.
        within_s: Seconds after which to give up.
    Raises:
        NoAnswer: Where it did not answer within that time.
        NoSuchJob: Where it does not know the job.
    """
    return JobInfo.parse(_scontrol(["--oneliner", "show", "job", job], within_s))


def requeue(job: str, within_s: float) -> None:
    """Put the job back into the queue; it ends now. Raises as `show` does."""
    _scontrol(["requeue", job], within_s)


def why(info: JobInfo, own_restarts: int) -> Why:
    """Why the job is being stopped.

    Args:
        info: What the controller says now.
        own_restarts: SLURM_RESTART_COUNT of this start.
    """
    if info.restarts > own_restarts:
        return Why.requeued  # GraceTime=0: Slurm did it before it told us
    if info.state == "COMPLETING" or info.state in ("CANCELLED", "TIMEOUT", "FAILED"):
        # PreemptTime stays set when a job is cancelled in the middle of its preemption's save.
        is_limit = info.reason == "TimeLimit" or info.state == "TIMEOUT"
        return Why.time_limit if is_limit else Why.cancelled
    if info.state == "PREEMPTED" or info.preempt_time is not None:
        return Why.preempted
    return Why.unknown


def _scontrol(arguments: list[str], within_s: float) -> str:
    deadline = time.monotonic() + within_s
    pause_s, said = _FIRST_PAUSE_S, ""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            done = subprocess.run(
                ["scontrol", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=min(_CALL_S, left_s),
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired:
            said = f"no answer within {min(_CALL_S, left_s):.1f} s"
        except OSError as error:
            raise NoAnswer(f"scontrol cannot be started: {error}") from error
        else:
            if done.returncode == 0:
                return done.stdout
            said = (done.stderr or done.stdout).strip()
            if "Invalid job id" in said:
                raise NoSuchJob(said)
        # With jitter: a thousand jobs that are preempted together must not ask together.
        time.sleep(min(pause_s * random.uniform(0.5, 1.5), max(deadline - time.monotonic(), 0)))
        pause_s = min(pause_s * 2, 5.0)
    raise NoAnswer(f"scontrol {' '.join(arguments)}: {said or 'no time left'}")
