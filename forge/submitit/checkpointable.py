"""`forge.Checkpointable`: the callable that submitit submits, without Hydra or forge's launchers.

    executor = submitit.SlurmExecutor("log")
    job = executor.submit(forge.Checkpointable(train, policy), lr=1e-3)

submitit alone ignores SIGTERM, Slurm's notice of a preemption; it saves inside a signal handler,
and requeues cancelled jobs. forge's handlers replace submitit's:

    signal ─► flag ─► the loop's next step boundary saves; callbacks, children
                                            ▼
    last act: asks Slurm why ─► budgets ─► requeues, or `job.result()` raises JobError
        └─ if the main thread hangs until the forced exit, the thread of the signals requeues the
           job from its last checkpoint; without a checkpoint the job fails

The counts for the budgets are in `<directory>/.forge/state.json`. submitit's own pickle is never
rewritten, so that a kill cannot leave a job without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from forge.config import loading, removed
from forge.config.schema import Policy, SignalAction
from forge.errors import Exit, ExitCode, JobError, Reason
from forge.filesystem.files import make_directory
from forge.job.ending import Ending
from forge.jobdir import job_dir
from forge.jobdir.job_files import RANK, RANKS, forge_dir
from forge.jobdir.job_state import JobState, State
from forge.process import processes
from forge.shutdown import stopping
from forge.slurm.batch_job import ASK_S
from forge.submitit import backends
from forge.submitit.backends import SubmittedTask

MARGIN_S = 10.0
"""Seconds before the forced exit, for requeueing a job whose main thread does not return."""
_LOOK_S = 0.2
_BEGIN_LOOK_S = 1.0
"""Seconds between two checks by another rank whether rank 0 has begun."""
_RAISED_S = 5.0
"""Seconds for another rank to store its exception."""


class Checkpointable:
    """A task that survives time limits and preemptions under plain submitit.

    `policy` is checked here, before anything is submitted. Your function opens `forge.Run` itself,
    with the same policy; relative checkpoint directories are inside the job's `directory`. As with
    any submitit job, `job.result()` returns the task's value, or raises its exception. If the job
    is not restarted (it was cancelled, or a limit of `requeue` is reached), `job.result()` raises
    an error with the reason.

    At the signal of a preemption or the time limit, the job saves at the next step boundary and is
    requeued; its result has the same bits as without the interruption. If the main thread reaches
    no boundary in time (a hanging collective, a loop without `run.steps`), nothing can be saved:
    once `shutdown.timeout_s` has passed since the signal, forge requeues the job, to resume from
    its last good checkpoint. This counts towards `requeue.max_failures`. A job without
    a checkpoint fails.

    A job can have several tasks, the ranks of one training: each calls `task`, with torchrun's
    variables in its environment, and rank 0 decides whether the job is restarted.

    Args:
        task: The function to call in the job, with the arguments of `submit`.
        policy: `cfg.resilience`, a mapping, a `forge.Policy`, or None for the defaults.
        directory: The job's directory; `%j` is replaced by the job id (`<array>_<task>` in arrays).
            By default `<job>_forge_<id of this object>` in submitit's folder. If the directory
            is that of an earlier submission, the job resumes from the checkpoints there; the
            count of its restarts begins at 0.
    Raises:
        ConfigError: For a policy that cannot work.
    """

    def __init__(
        self,
        task: Callable[..., Any],
        policy: Any = None,
        directory: str | Path | None = None,
    ) -> None:
        self.task = task
        self.policy: Policy = loading.load(policy)
        # Job ids are reused (a LocalExecutor's are pids): a new job must not resume from the
        # checkpoints of an old one.
        self.directory = str(directory or f"%j_forge_{uuid.uuid4().hex[:8]}")
        self._is_in_folder = directory is None

    def __getstate__(self) -> dict[str, Any]:
        """The pickled state: the policy as plain values, which later versions of forge can read."""
        return vars(self) | {"policy": _plain(asdict(self.policy))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the job: keys that no longer exist are ignored, with a notice."""
        policy, ignored = removed.without(state["policy"])
        removed.notify(ignored)
        vars(self).update(state | {"policy": loading.load(policy)})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task; outside a submitit job, just call it."""
        submitted = backends.submitted_task()
        if submitted is None:
            return self.task(*args, **kwargs)
        rank, size = submitted.rank, submitted.size
        if size > 1:
            names = {RANK: str(rank), RANKS: str(size)}
            os.environ.update(names | submitted.world.variables())
        directory = Path(self.directory.replace("%j", submitted.job))
        directory = submitted.folder / directory if self._is_in_folder else directory
        attempt = _Attempt(self.policy, submitted, directory.absolute())
        return (attempt.follow if rank else attempt.run)(self.task, args, kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Called by submitit when it requeues the job, not by you.

        If the loop reached a step boundary after the signal, the state is saved already. If a loop
        has ended and its `forge.Run` is still open, or a long function of `run.every` is running,
        this call saves. If the main thread is still inside a step, or no loop has begun, nothing
        is saved, and the job resumes from its last checkpoint, which the log names.

        Args:
            args: The positional arguments of the task.
            kwargs: The keyword arguments of the task.
        Returns:
            A `DelayedSubmission` of this task with the same arguments.
        """
        from submitit.core.utils import DelayedSubmission

        session = sys.modules.get("forge.training.attempt")
        if session is not None and session.active() is not None:
            session.active().boundary.checkpoint()
        return DelayedSubmission(self, *args, **kwargs)

    def __submitit_checkpoint__(self, *args: Any, **kwargs: Any) -> Any:
        """As `checkpoint`: submitit, and wrappers of its tasks, look for this name first."""
        return self.checkpoint(*args, **kwargs)


# -- one start ---------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Values of a policy without its classes, which a later version of forge can lack."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.name if isinstance(value, Enum) else value


def _has_failed(state: JobState | None) -> TypeGuard[JobState]:
    """Whether rank 0 has ended the job."""
    return state is not None and state.state in (State.stopped, State.failed)


class _Attempt:
    """One start of a job: handles signals, runs the task, decides on a restart."""

    def __init__(self, policy: Policy, task: SubmittedTask, directory: Path) -> None:
        # First of all: until here submitit's handlers ignore SIGTERM.
        name = task.own_signal.name.removeprefix("SIG")
        policy.signal.actions.setdefault(name, SignalAction.requeue)
        self._handler = stopping.install(policy, forge_dir(directory))
        stopping.allow(3 * ASK_S + MARGIN_S)
        self._task = task
        self._backend = backends.backend_of(task, directory, policy)
        self._job = self._backend.job
        job_dir.set_directory(directory, self.command)
        self._has_left = threading.Event()

    @property
    def command(self) -> str:
        """The shell line that resumes the job."""
        return self._backend.command

    # -- rank 0 --------------------------------------------------------------------------------

    def run(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the value of the task; otherwise raises, or exits for a restart."""
        self._task.remove_result()
        self._begin()
        stopping.use_requeuer(self)
        failure: BaseException | None = None
        value: Any = None
        try:
            value = task(*args, **kwargs)
        except SystemExit as error:
            failure = error if error.code not in (None, 0) else None
        except Exception as error:  # noqa: BLE001 - raised again, unless a rule says otherwise
            failure = error
        # No interruption from here on, while a result is stored or the job is requeued.
        stopping.hold_interrupts(is_held=True)
        if failure is None:
            self._backend.finish()
            self._handler.cancel_forced_exit()
            return value
        following = self._what_follows(failure)
        if following is failure:
            raise failure
        raise following from None

    def _begin(self) -> None:
        """Take over the budgets. Raises JobError if the job must not be started again."""
        make_directory(forge_dir(self._job.directory))
        before = self._backend.take_over()
        if before is not None and before.ends_next_start:
            raise self._error(before.because, self._job.repeat_end(before))
        if before is not None and before.state is State.running:
            killed = Ending.of(-signal.SIGKILL)
            decision = self._backend.decide(killed)
            if not decision.starts_again:
                because = (
                    "an earlier start did not record its end, which counts as a kill:"
                    f" {decision.because}"
                )
                raise self._error(because, self._job.end(killed, because))
        self._backend.note_start(before)

    # -- other ranks ---------------------------------------------------------------------------

    def follow(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the task on another rank than 0; rank 0 decides how all ranks end."""
        self._task.remove_result()
        threading.Thread(target=self._watch_rank_0, name="forge-rank-0", daemon=True).start()
        try:
            return task(*args, **kwargs)
        except SystemExit:
            until = time.monotonic() + MARGIN_S
            while (state := self._backend.of_this_start()) is None or not state.is_decided:
                if time.monotonic() > until:
                    break
                time.sleep(_LOOK_S)
            if _has_failed(state):
                raise JobError(state.because, state.exit_code) from None
            raise
        finally:
            self._has_left.set()

    def _watch_rank_0(self) -> None:
        """Wait until rank 0 has begun; exit if it refuses to, since rendezvous would time out."""
        while (state := self._backend.of_this_start()) is None:
            if self._has_left.wait(_BEGIN_LOOK_S):
                return
        if _has_failed(state) and not self._has_left.is_set():
            self._task.store_error(state.because)
            os._exit(state.exit_code)

    # -- the last act --------------------------------------------------------------------------

    def _what_follows(self, failure: BaseException) -> BaseException:
        """Requeue if that is due; returns the exception with which this process ends."""
        received = self._handler.signal_received
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else 1
            text = failure.text if isinstance(failure, Exit) else f"sys.exit({failure.code!r})"
            ending = Ending.of(code, failure.reason if isinstance(failure, Exit) else None)
        else:
            text = f"{type(failure).__name__}: {failure}"
            ending = Ending.of(1, text=text)
            # The signal killed a helper process first, or caused the error.
            ending = ending if received is None else Ending.of(self._unsaved_code())
        code = self._settle(ending)
        self._handler.cancel_forced_exit()
        because = self._job.state.because
        if self._backend.starts_again:
            return Exit(code, f"requeued: {because}")
        if received is None and not isinstance(failure, SystemExit):
            return failure
        return self._error(f"{text}; not started again: {because}", code)

    def requeue(self, code: int, reason: Reason) -> int:
        """See `stopping.Requeuer`; called by a Run, or by the thread of a forced exit."""
        # None: another rank has received it.
        is_limit = self._handler.signal_received in (None, self._task.own_signal)
        if code == ExitCode.REQUEUE and is_limit:
            reason = Reason.time_limit
        is_unsaved = code == ExitCode.FORCED and reason is Reason.forced
        ending = Ending.of(self._unsaved_code() if is_unsaved else code, reason)
        if threading.current_thread() is threading.main_thread():
            return self._settle(ending)
        return self._end_by_force(ending)

    def _unsaved_code(self) -> int:
        """The exit code of a stop without a save: 70, unless a person wants the job to end."""
        is_by_a_person = self._handler.signal_received is signal.SIGINT
        is_by_a_person |= not self._task.is_on_slurm and not self._handler.is_requeue
        return self._handler.exit_code if is_by_a_person else int(ExitCode.FORCED)

    def _settle(self, ending: Ending) -> int:
        """Requeue the job if the limits allow it; returns the exit code."""
        is_lost = ending.reason is Reason.rank_lost and self._backend.exit_code is None
        if is_lost and (rank := self._task.raised_elsewhere(_RAISED_S)):
            text = f"rank {rank} raised an error: see its log, or job.task({rank}).exception()"
            ending = Ending.of(1, text=text)
        code, text = self._backend.restart_code, "the job is requeued"
        return self._backend.settle(ending, lambda: stopping.leave(code, text))

    def _end_by_force(self, ending: Ending) -> NoReturn:
        """End without the main thread, which is in a call that hangs, or swallows `Exit`."""
        self._handler.cancel_forced_exit()
        with contextlib.suppress(OSError), open(2, "w", closefd=False) as output:
            faulthandler.dump_traceback(output, all_threads=True)
        if self._job.trainings.saved_step() < 0:
            text = "the task did not exit in time, and has no checkpoint to resume from"
            ending = Ending(Reason.failed, int(ExitCode.FORCED), text)
        code = self._settle(ending)
        if not self._backend.starts_again:
            self._task.store_error(str(self._error(self._job.state.because, code)))
        processes.kill_descendants()
        os._exit(code)

    def _error(self, because: str, code: int) -> JobError:
        return JobError(
            f"{because}. Its checkpoints are in {self._job.directory}; to resume:\n"
            f"  {self.command}",
            code,
        )
