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
import logging
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from forge import messages
from forge.config.schema import Policy
from forge.errors import ExitCode, Reason, SlurmError, SlurmRefused
from forge.job.ending import Ending
from forge.job.job import Job, Trainings
from forge.job.last_act import LastAct
from forge.job.requeue import Decision
from forge.jobdir import job_dir, spawned, verdict
from forge.jobdir.job_files import REHEARSAL
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import RequeueLimits
from forge.process import world
from forge.process.time_limit import SLURM_END_TIME
from forge.shutdown import stopping
from forge.slurm import client
from forge.slurm.job_info import FINAL, IMPOSED, JobInfo, Why
from forge.slurm.own_job import ASK_S, OwnJob

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
        self._work, self._own = work, OwnJob(os.environ)
        state = JobState(
            state=State.queued,
            job=self._own.name,
            start=str(self._own.restarts),
            nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
            has_steps=not work.is_command,
            argv=sys.argv[1:],  # for `same_dir`
        )
        super().__init__(Job(directory, work.limits, work.trainings, state, messages.warn))
        self._info: JobInfo | None = None
        self._why = Why.unknown
        self._is_limit_near = False
        self.is_batch = os.environ.get("ENVIRONMENT") == "BATCH"  # until the controller answers
        with contextlib.suppress(SlurmError):
            self._learn(_START_S)
        self.stops_at = math.inf
        """Unix time at which the job has to save and exit."""
        if not self.is_batch:
            return
        left_s = None if self._info is None else self._info.ends_in_s()
        if left_s is not None:
            end = time.time() + left_s
            self.stops_at = end - min(work.warning_s, left_s / 2)
            os.environ.setdefault(SLURM_END_TIME, f"{end:.0f}")  # Slurm sets it since version 23
        self.begin(self.take_over())

    @property
    def command(self) -> str:
        """The shell command that starts the job again by hand."""
        info = self._info
        if info is None or not info.script:
            return self._own.command
        script = shlex.quote(info.script) if os.path.exists(info.script) else info.script
        again = f"cd {shlex.quote(info.work_dir)} && sbatch {script}"
        if not info.is_requeueable:
            return again
        return f"{self._own.command}\nor, once Slurm has forgotten the job:\n  {again}"

    def _learn(self, within_s: float = ASK_S) -> JobInfo:
        self._info = self._own.show(within_s)
        self.is_batch = self._info.is_batch
        return self._info

    # -- the last act ----------------------------------------------------------------------------

    def requeue(self, code: int, reason: Reason) -> int:
        """See `stopping.Requeuer`."""
        job, ending = self.job, Ending.of(code, reason)
        if not job.limits.enabled:
            return self._end(ending, "is not", job.limits.why_not)
        try:
            ending = self._explain(ending)
            job.end_attempt()
            decision = self.decide(ending)
            if self.is_requeued:
                decision = Decision(starts_again=True, because=_IS_BACK)
            if not decision.starts_again:
                return self._end(ending, "is not", decision.because)
            job.record_end(ending)
            self.start_again(decision)
        except SlurmError as error:
            return self._end(ending, "could not be", str(error), logging.ERROR)
        self._judge(f"requeued: {decision.because}", int(ExitCode.REQUEUE), ending.reason)
        messages.say(f"Requeued job {self._own.name}: {decision.because}")
        return int(ExitCode.REQUEUE)

    def _explain(self, ending: Ending) -> Ending:
        """The end, with Slurm's reason if Slurm has ended the job. Raises SlurmError."""
        if ending.reason in FINAL:
            return ending
        found = self._ask(ending)
        comes_back = self._can_come_back(found) and not self.is_requeued
        if comes_back and self._wait_for_steps(found.reason):
            return self._ask(ending)  # the job can have been cancelled meanwhile
        return found

    def _ask(self, ending: Ending) -> Ending:
        info = self._learn()
        why = self._why = self._own.why(info)
        left_s = info.ends_in_s()
        self._is_limit_near = left_s is not None and left_s <= self._work.warning_s + _EARLY_S
        if why is Why.cancelled:
            return ending.imposed(Reason.cancelled, "it was cancelled")
        if ending.code in _BY_A_PERSON and why is not Why.requeued:
            return ending.imposed(Reason.cancelled, _BY_HAND)
        if ending.code == ExitCode.FORCED:
            return ending  # it did not save: this counts as a failure
        if why in IMPOSED:
            return ending.imposed(IMPOSED[why])
        if ending.code == ExitCode.REQUEUE:
            is_limit = self._is_limit_near or ending.reason is Reason.time_limit
            return ending.imposed(Reason.time_limit if is_limit else Reason.requested)
        is_stop = ending.code == ExitCode.TERMINATED
        return ending.imposed(Reason.cancelled, _BY_HAND) if is_stop else ending

    def _can_come_back(self, ending: Ending) -> bool:
        """Whether Slurm, and not the training itself or a person, has ended the job."""
        is_forced_by_slurm = self._why in IMPOSED or self._is_limit_near
        is_forced = ending.code == ExitCode.FORCED and is_forced_by_slurm
        return ending.reason is not Reason.cancelled and (ending.is_imposed or is_forced)

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm, the script or a person has requeued the job already."""
        return self._why is Why.requeued

    def refusal(self, ending: Ending) -> str:
        """Slurm has not ended the job, or would not requeue it."""
        if not self._can_come_back(ending):
            return "Slurm has not ended the job"
        if self._info is not None and not self._info.is_requeueable:
            return (
                "Slurm does not requeue this job: it was submitted with `--no-requeue`, or the"
                " cluster has `JobRequeue=0`"
            )
        return ""

    def put_back(self, pause_s: float) -> None:
        """Requeue the job. Raises SlurmError if Slurm refuses."""
        self._own.requeue()
        if pause_s:
            with contextlib.suppress(SlurmError), stopping.block_signals():
                client.delay(self._own.name, pause_s, ASK_S)

    def _wait_for_steps(self, reason: Reason) -> bool:
        """Wait until no other step runs, or time runs out. Returns whether it had to wait."""
        own = f"{self._own.name}.{os.environ.get('SLURM_STEP_ID', '')}"
        until = time.monotonic() + self._left_s(reason)
        has_waited = False
        while time.monotonic() < until:
            with contextlib.suppress(SlurmRefused), stopping.block_signals():
                steps = client.steps(self._own.name, ASK_S)
                others = [one for one in steps if one != own and one.rpartition(".")[2].isdecimal()]
                if not others:
                    break
                if not has_waited:
                    what = f"Slurm step{'s' * (len(others) > 1)} {', '.join(others)}"
                    messages.say(f"Job {self._own.name} will be requeued when {what} has ended")
            has_waited = True
            time.sleep(_LOOK_S)
        return has_waited

    def _left_s(self, reason: Reason) -> float:
        """Seconds that the other steps have to end."""
        left_s = self._info.ends_in_s() if self._info is not None else None
        if reason is Reason.requested or left_s is None:
            return self._work.warning_s
        return left_s - _SPARE_S

    def _end(self, ending: Ending, how: str, because: str, level: int = logging.INFO) -> int:
        self.job.record_end(ending)
        self.job.end(ending, because)
        text = f"{self._own.name} {how} requeued: {because}"
        self._judge(f"job {text}", ending.code)
        messages.say(f"Job {text}. To resume it:\n  {self.command}", level)
        return ending.code

    def _judge(self, text: str, code: int, reason: Reason | None = None) -> None:
        """Add the text to the verdict that the Run has written."""
        directory = self.job.directory
        said = verdict.read(directory)
        if said is not None and said.pid == os.getpid():
            reason, text = reason or said.reason, f"{said.text}; {text}"
            verdict.write(directory, replace(said, reason=reason, text=text, exit_code=code))


def here(directory: Path, work: Work) -> BatchJob | None:
    """The batch job whose outermost forge process this is; None in any other process."""
    is_interactive = hasattr(builtins, "__IPYTHON__") or hasattr(sys, "ps1")
    if "SLURM_JOB_ID" not in os.environ or is_interactive or REHEARSAL in os.environ:
        return None
    is_below = job_dir.is_supervised() or spawned.inherited() is not None
    if is_below or world.of(os.environ).rank:
        return None
    found = BatchJob(directory, work)
    return found if found.is_batch else None


def of_run(policy: Policy, directory: Path) -> BatchJob | None:
    """As `here`, for a training with this policy in the job directory `directory`."""
    limits, place = RequeueLimits.of(policy.requeue), policy.checkpoint.dir
    return here(directory, Work(limits, policy.signal.warning_s, Trainings([directory], place)))
