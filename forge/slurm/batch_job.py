"""A batch script written by hand: the job comes back after a preemption or its time limit.

No supervisor runs outside the processes of such a job. So its outermost forge process (rank 0 of a
Run; a launcher, for all its jobs) requeues the job as its last act, when every rank has saved and
run its callbacks:

    asks Slurm why ─► waits for the job's other steps ─► asks again ─► budgets ─► scontrol requeue

If Slurm gives no reason, somebody stopped the job by hand, and it is not requeued.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from forge import messages
from forge.config.schema import Policy
from forge.errors import ExitCode, NoAnswer, NotRequeueable, Reason, SlurmError, SlurmRefused
from forge.job.ending import Ending, signal_name
from forge.job.job import Job, Trainings
from forge.job.last_act import LastAct
from forge.jobdir import job_dir
from forge.jobdir.job_files import REHEARSAL
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import RequeueLimits
from forge.process import world
from forge.process.time_limit import SLURM_END_TIME
from forge.slurm import client
from forge.slurm.job_info import FINAL, IMPOSED, JobInfo, Why

ASK_S = 20.0
"""Timeout for one question to Slurm's controller, with retries while the controller is busy."""
_START_S = 5.0
"""Timeout for questions to Slurm at the start: a job also trains without the answers."""
_SPARE_S = 10.0
"""Seconds reserved for the requeue, before Slurm ends the job."""
_LOOK_S = 1.0
"""Seconds between two checks of the job's other steps."""
_EARLY_S = 90.0
"""Slurm sends the signal before the time limit up to a minute earlier than requested."""
_BY_A_PERSON = (ExitCode.INTERRUPTED, ExitCode.HANGUP)
_BY_HAND = "the signal was sent by a person or a program (`kill`, `scancel --signal`), not by Slurm"
_SCRIPT_KILLED = (
    "its batch script was ended by {}. If Slurm has sent that signal before the time limit, remove"
    " `B:` from `--signal=B:{}`: the training gets it then, and the job is requeued"
)
_IS_BACK = "requeued by Slurm, by the script, or by `scontrol requeue`"


@dataclass(frozen=True)
class Work:
    """The job's trainings or command, and the limits of its requeues."""

    limits: RequeueLimits
    warning_s: float
    """Seconds before the time limit at which the policy expects Slurm's signal."""
    trainings: Trainings
    is_command: bool = False
    """Whether it is a command, whose progress forge cannot see."""


class BatchJob(LastAct):
    """The Slurm job, as its outermost forge process sees it.

    Args:
        directory: The directory whose ledger counts the requeues.
        work: The trainings or the command of the job.
    """

    is_queue = True

    def __init__(self, directory: Path, work: Work) -> None:
        self._work, self._name = work, client.own_job(os.environ)
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        state = JobState(
            state=State.queued,
            job=self._name,
            start=str(self._restarts),
            nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
            has_steps=not work.is_command,
            argv=sys.argv[1:],  # for `same_dir`
        )
        super().__init__(Job(directory, work.limits, work.trainings, state, messages.warn))
        self._info: JobInfo | None = None
        self._why = Why.unknown
        self._is_limit_near = False
        self.stops_at = math.inf
        """Unix time at which the job has to save and exit."""

    def start_up(self) -> bool:
        """Begin this start of the job; returns whether it is one of a batch script."""
        is_batch = os.environ.get("ENVIRONMENT") == "BATCH"
        with contextlib.suppress(SlurmError):
            is_batch = self._learn(_START_S).is_batch
        left_s = None if self._info is None else self._info.ends_in_s()
        if is_batch and left_s is not None:
            end = time.time() + left_s
            self.stops_at = end - min(self._work.warning_s, left_s / 2)
            os.environ.setdefault(SLURM_END_TIME, f"{end:.0f}")  # Slurm sets it since version 23
        if is_batch:
            self.note_start(self.take_over())
        return is_batch

    @property
    def command(self) -> str:
        """The shell command that starts the job again by hand."""
        info, requeue = self._info, f"scontrol requeue {self._name}"
        if info is None or not info.script:
            return requeue
        script = shlex.quote(info.script) if os.path.exists(info.script) else info.script
        again = f"cd {shlex.quote(info.work_dir)} && sbatch {script}"
        if not info.is_requeueable:
            return again
        return f"{requeue}\nor, once Slurm has forgotten the job:\n  {again}"

    def _learn(self, within_s: float = ASK_S) -> JobInfo:
        self._info = client.show(self._name, within_s)
        return self._info

    # -- the last act ----------------------------------------------------------------------------

    def explain(self, ending: Ending) -> Ending:
        """The end, with Slurm's reason if Slurm has ended the job. Raises SlurmError."""
        if ending.reason in FINAL:
            return ending
        found = self._ask(ending)
        is_waiting = self.can_come_back(found) and not self.is_requeued
        if is_waiting and self._wait_for_steps(found.reason):
            return self._ask(ending)  # the job can have been cancelled meanwhile
        return found

    def _ask(self, ending: Ending) -> Ending:
        info = self._learn()
        why = self._why = client.why(info, self._restarts, ASK_S)
        left_s = info.ends_in_s()
        self._is_limit_near = left_s is not None and left_s <= self._work.warning_s + _EARLY_S
        if why is Why.cancelled and info.is_script_killed:
            name = signal_name(info.script_signal)
            text = _SCRIPT_KILLED.format(name, name.removeprefix("SIG"))
            return ending.imposed(Reason.cancelled, text)
        if why is Why.cancelled:
            return ending.imposed(Reason.cancelled, "it was cancelled")
        if ending.code in _BY_A_PERSON and why is not Why.requeued:
            return ending.imposed(Reason.cancelled, _BY_HAND)
        if ending.code == ExitCode.FORCED:
            return ending  # it did not save: this counts as a failure
        if why in IMPOSED:
            return ending.imposed(IMPOSED[why], _IS_BACK if why is Why.requeued else "")
        if ending.code == ExitCode.REQUEUE:
            is_limit = self._is_limit_near or ending.reason is Reason.time_limit
            return ending.imposed(Reason.time_limit if is_limit else Reason.requested)
        is_stop = ending.code == ExitCode.TERMINATED
        return ending.imposed(Reason.cancelled, _BY_HAND) if is_stop else ending

    def can_come_back(self, ending: Ending) -> bool:
        """Whether Slurm, and not the training itself or a person, has ended the job."""
        is_forced_by_slurm = self._why in IMPOSED or self._is_limit_near
        is_forced = ending.code == ExitCode.FORCED and is_forced_by_slurm
        is_final = ending.reason in (Reason.cancelled, Reason.out_of_memory)
        return not is_final and (ending.is_imposed or is_forced)

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm, the script or a person has requeued the job already."""
        return self._why is Why.requeued

    def refusal(self, ending: Ending) -> str:
        """Slurm has not ended the job, or would not requeue it."""
        if not self.can_come_back(ending):
            return "Slurm has not ended the job"
        if self._info is not None and not self._info.is_requeueable:
            return (
                "Slurm does not requeue this job: it was submitted with `--no-requeue`, or the"
                " cluster has `JobRequeue=0`"
            )
        return ""

    def put_back(self, pause_s: float) -> None:
        """Requeue the job. Raises SlurmError if Slurm refuses."""
        try:
            client.requeue(self._name, ASK_S)
        except (NoAnswer, NotRequeueable):  # Slurm ends this step meanwhile
            if client.why(self._learn(), self._restarts, ASK_S) is not Why.requeued:
                raise
        if pause_s:
            with contextlib.suppress(SlurmError):
                client.delay(self._name, pause_s, ASK_S)

    def _wait_for_steps(self, reason: Reason) -> bool:
        """Wait until no other step runs, or time runs out. Returns whether it had to wait."""
        own = f"{self._name}.{os.environ.get('SLURM_STEP_ID', '')}"
        until = time.monotonic() + self._left_s(reason)
        has_waited = False
        while time.monotonic() < until:
            with contextlib.suppress(SlurmRefused):
                steps = client.steps(self._name, ASK_S)
                others = [one for one in steps if one != own and one.rpartition(".")[2].isdecimal()]
                if not others:
                    break
                if not has_waited:
                    what = f"Slurm step{'s' * (len(others) > 1)} {', '.join(others)}"
                    messages.say(f"Job {self._name} will be requeued when {what} has ended")
            has_waited = True
            time.sleep(_LOOK_S)
        return has_waited

    def _left_s(self, reason: Reason) -> float:
        """Seconds that the other steps have to end."""
        left_s = self._info.ends_in_s() if self._info is not None else None
        if reason is Reason.requested or left_s is None:
            return self._work.warning_s
        return left_s - _SPARE_S


def here(directory: Path, work: Work) -> BatchJob | None:
    """The batch job whose outermost forge process this is; None in any other process."""
    is_interactive = hasattr(builtins, "__IPYTHON__") or hasattr(sys, "ps1")
    if "SLURM_JOB_ID" not in os.environ or is_interactive or REHEARSAL in os.environ:
        return None
    if job_dir.is_supervised() or world.of(os.environ).rank:
        return None
    found = BatchJob(directory, work)
    return found if found.start_up() else None


def of_run(policy: Policy, directory: Path) -> BatchJob | None:
    """As `here`, for a training with this policy in the job directory `directory`."""
    limits, place = RequeueLimits.of(policy.requeue), policy.checkpoint.dir
    return here(directory, Work(limits, policy.signal.warning_s, Trainings([directory], place)))
