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
from forge.job.record import Record
from forge.job.requeue import Decision, Ending, decide_restart
from forge.jobdir import job_dir, ledger, spawned, verdict
from forge.jobdir.job_files import REHEARSAL
from forge.jobdir.job_state import State
from forge.jobdir.plan import RequeueLimits
from forge.process import world
from forge.process.time_limit import SLURM_END_TIME
from forge.shutdown import stopping
from forge.slurm import client
from forge.slurm.job_info import JobInfo, Why
from forge.slurm.own_job import ASK_S, OwnJob

_START_S = 5.0
"""Timeout for questions to Slurm at the start: a job also trains without the answers."""
_SPARE_S = 10.0
"""Seconds reserved for the requeue, before Slurm ends the job."""
_LOOK_S = 1.0
"""Seconds between two checks of the job's other steps."""
_EARLY_S = 90.0
"""Slurm sends the signal before the time limit up to a minute earlier than requested."""

_FINAL = (ExitCode.HALTED, ExitCode.UNHEALTHY, ExitCode.IN_USE, ExitCode.BAD_CONFIG)
"""Exit codes after which another start would end in the same way, whatever Slurm does."""
_BY_A_PERSON = (ExitCode.INTERRUPTED, ExitCode.HANGUP)


@dataclass(frozen=True)
class Work:
    """The job's trainings or command, and the limits of its requeues."""

    limits: RequeueLimits
    warning_s: float
    """Seconds before the time limit at which the policy expects Slurm's signal."""
    directories: list[Path]
    """The directories of its trainings."""
    checkpoint_dir: str
    """`checkpoint.dir` of the policy."""
    is_command: bool = False
    """Whether it is a command, whose progress forge cannot see."""

    def saved_step(self) -> int:
        """The number of steps that all trainings have saved; -1 before the first checkpoint."""
        saved = (ledger.saved_steps(one, self.checkpoint_dir) for one in self.directories)
        return sum(step + 1 for step in saved) - 1

    def has_stepped(self, since: float) -> bool:
        """Whether a training has done a step since that time."""
        return any(ledger.has_stepped(one, since) for one in self.directories)


class BatchJob:
    """The Slurm job, as its outermost forge process sees it.

    Args:
        directory: The directory whose ledger counts the requeues.
        work: The trainings or the command of the job.
    """

    def __init__(self, directory: Path, work: Work) -> None:
        self._directory = directory
        self._work = work
        self._began = time.time()
        self._own = OwnJob(os.environ)
        self._record = Record(directory, self._own.name, str(self._own.restarts))
        self._info: JobInfo | None = None
        self.is_batch = os.environ.get("ENVIRONMENT") == "BATCH"  # until the controller answers
        with contextlib.suppress(SlurmError):
            self._learn(_START_S)
        self.stops_at = math.inf
        """Unix time at which the job has to save and exit."""
        if not self.is_batch:
            return
        left_s = None if self._info is None else self._info.ends_in_s()
        if left_s is not None:
            end = self._began + left_s
            self.stops_at = end - min(work.warning_s, left_s / 2)
            os.environ.setdefault(SLURM_END_TIME, f"{end:.0f}")  # Slurm sets it since version 23
        before = self._record.read()
        if before is not None and not before.state.is_final:
            self._record.counts = before.counts
        else:
            self._record.counts.best_step = work.saved_step()
        self._write(State.running)

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
        if code in _FINAL:
            return self._end(code, "is not requeued")
        if not self._work.limits.enabled:
            return self._end(code, f"is not requeued: {self._work.limits.why_not}")
        try:
            return self._requeue(Ending.of(code, reason), reason)
        except SlurmError as error:
            return self._end(code, f"could not be requeued: {error}", logging.ERROR)

    def _requeue(self, ending: Ending, reported: Reason) -> int:
        code = ending.code
        why, reason = self._ask(code, reported)
        if reason is not None and why is not Why.requeued and self._wait_for_steps(reason):
            why, reason = self._ask(code, reported)  # the job can have been cancelled meanwhile
        if reason is None:
            because = (
                "it was cancelled"
                if why is Why.cancelled
                else "the signal was sent by a person or a program (`kill`, `scancel --signal`),"
                " not by Slurm"
            )
            return self._end(code, f"is not requeued: {because}")
        # An attempt that did not save counts as a failure.
        decision = self._decide(ending if code == ExitCode.FORCED else ending.imposed(reason))
        if why is Why.requeued:
            return self._is_back(reason, "by Slurm, by the script, or by `scontrol requeue`")
        if not decision.starts_again:
            return self._end(code, f"is not requeued: {decision.because}")
        self._write(State.queued, decision.because)  # before Slurm can end this process
        self._own.requeue()
        if decision.pause_s:
            with contextlib.suppress(SlurmError), stopping.block_signals():
                client.delay(self._own.name, decision.pause_s, ASK_S)
        return self._is_back(reason, decision.because)

    def _ask(self, code: int, reported: Reason) -> tuple[Why, Reason | None]:
        """Why Slurm ends the job, and the reason to requeue it, or None to let it end."""
        info = self._learn()
        why = self._own.why(info)
        return why, self._reason(why, code, reported, info)

    def _decide(self, ending: Ending) -> Decision:
        """Whether the limits allow a requeue."""
        work, info = self._work, self._info
        if info is not None and not info.is_requeueable:
            because = (
                f"{ending.text}, but Slurm does not requeue this job: it was submitted with"
                " `--no-requeue`, or the cluster has `JobRequeue=0`"
            )
            return Decision(starts_again=False, because=because)
        return decide_restart(
            ending,
            self._record.counts,
            work.limits,
            work.saved_step(),
            has_run=not work.is_command,
            is_cut_short=not work.is_command and not work.has_stepped(self._began),
        )

    def _reason(self, why: Why, code: int, reported: Reason, info: JobInfo) -> Reason | None:
        """The reason to requeue the job; None if it ends here."""
        if why is Why.cancelled or (code in _BY_A_PERSON and why is not Why.requeued):
            return None
        if why in (Why.preempted, Why.requeued):
            return Reason.preempted
        if why is Why.time_limit or reported is Reason.time_limit:
            return Reason.time_limit
        if code != ExitCode.REQUEUE:
            return None
        left_s = info.ends_in_s()
        is_near = left_s is not None and left_s <= self._work.warning_s + _EARLY_S
        return Reason.time_limit if is_near else Reason.requested

    def _wait_for_steps(self, imposed: Reason) -> bool:
        """Wait until no other step runs, or time runs out. Returns whether it had to wait."""
        own = f"{self._own.name}.{os.environ.get('SLURM_STEP_ID', '')}"
        until = time.monotonic() + self._left_s(imposed)
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

    def _left_s(self, imposed: Reason) -> float:
        """Seconds that the other steps have to end."""
        left_s = self._info.ends_in_s() if self._info is not None else None
        if imposed is Reason.requested or left_s is None:
            return self._work.warning_s
        return left_s - _SPARE_S

    def _is_back(self, reason: Reason, because: str) -> int:
        self._write(State.queued, because)
        self._judge(f"requeued: {because}", int(ExitCode.REQUEUE), reason)
        messages.say(f"Requeued job {self._own.name}: {because}")
        return int(ExitCode.REQUEUE)

    def _end(self, code: int, text: str, level: int = logging.INFO) -> int:
        self._write(State.stopped, text, code)
        self._judge(f"job {self._own.name} {text}", code)
        messages.say(f"Job {self._own.name} {text}. To resume it:\n  {self.command}", level)
        return code

    def _write(self, state: State, because: str = "", code: int = 0) -> None:
        self._record.write(state, because, code, argv=sys.argv[1:])  # for `same_dir`

    def _judge(self, text: str, code: int, reason: Reason | None = None) -> None:
        """Add the text to the verdict that the Run has written."""
        said = verdict.read(self._directory)
        if said is not None and said.pid == os.getpid():
            reason, text = reason or said.reason, f"{said.text}; {text}"
            verdict.write(self._directory, replace(said, reason=reason, text=text, exit_code=code))


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
    return here(directory, Work(limits, policy.signal.warning_s, [directory], place))
