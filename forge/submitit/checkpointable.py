"""`forge.Checkpointable`: the callable that submitit submits, without Hydra or forge's launchers.

    executor = submitit.SlurmExecutor("log")
    job = executor.submit(forge.Checkpointable(train, policy), lr=1e-3)

submitit alone ignores SIGTERM, Slurm's notice of a preemption; it saves inside a signal handler,
and requeues cancelled jobs. forge's handlers replace submitit's:

    signal ─► flag ─► the loop's next step boundary saves and exits
                                                        ▼
    main thread: callbacks, children ─► asks Slurm why ─► budgets ─► requeues, or raises JobError
                └─ if the main thread hangs: `MARGIN_S` before the forced exit, a thread requeues
                   the job from its last checkpoint; without a checkpoint the job fails

The counts for the budgets are in `<directory>/.forge/state.json`. submitit's own pickle is never
rewritten, so that a kill cannot leave a job without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from forge import messages
from forge.config import loading, removed
from forge.config.schema import Policy, SignalAction
from forge.errors import Exit, ExitCode, JobError, Reason, SlurmError
from forge.filesystem.foreign import foreign
from forge.job.ending import Ending
from forge.job.requeue import Decision
from forge.jobdir import job_dir
from forge.jobdir.job_files import RANK, RANKS, forge_dir
from forge.jobdir.job_state import JobState, State
from forge.process import processes
from forge.shutdown import stopping
from forge.slurm.own_job import ASK_S
from forge.submitit import backends
from forge.submitit.backends import SubmittedJob

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
    shortly before `shutdown.timeout_s` has passed since the signal, forge requeues the job, to
    resume from its last good checkpoint. This counts towards `requeue.max_failures`. A job without
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
        return vars(self) | {"policy": removed.plain(self.policy)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the job: keys that no longer exist are ignored, with a notice."""
        policy, ignored = removed.without(removed.plain(state["policy"]))
        removed.notify(ignored)
        vars(self).update(state | {"policy": loading.load(policy)})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task; outside a submitit job, just call it."""
        backend = backends.current(self._place, self.policy)
        if backend is None:
            return self.task(*args, **kwargs)
        rank, size = backend.task.rank, backend.task.size
        if size > 1:
            names = {RANK: str(rank), RANKS: str(size)}
            os.environ.update(names | backend.world.variables())
        attempt = _Attempt(self.policy, backend)
        return (attempt.follow if rank else attempt.run)(self.task, args, kwargs)

    def _place(self, folder: Path, job: str) -> Path:
        """The directory of the job, from submitit's folder and the job's name."""
        directory = Path(self.directory.replace("%j", job))
        return (folder / directory if self._is_in_folder else directory).absolute()

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


# -- one start ---------------------------------------------------------------------------------


def _has_failed(state: JobState | None) -> TypeGuard[JobState]:
    """Whether rank 0 has ended the job."""
    return state is not None and state.state in (State.stopped, State.failed)


class _Attempt:
    """One start of a job: handles signals, runs the task, decides on a restart."""

    def __init__(self, policy: Policy, backend: SubmittedJob) -> None:
        directory = backend.job.directory
        # First of all: until here submitit's handlers ignore SIGTERM.
        name = backend.task.own_signal.name.removeprefix("SIG")
        policy.signal.actions.setdefault(name, SignalAction.requeue)
        self._handler = stopping.install(policy, forge_dir(directory))
        stopping.allow(3 * ASK_S + MARGIN_S)
        job_dir.place(directory, backend.command)
        stopping.has_job(directory)
        self._backend, self._job = backend, backend.job
        self._has_left = threading.Event()
        self._decider = threading.Lock()
        """Held by the thread that decides whether the job is restarted."""

    def run(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the value of the task; otherwise raises, or exits for a restart."""
        value: Any = None
        try:
            self._warn_of_others()
            self._backend.task.remove_result()
            refused = self._backend.begin_job()
            if refused is None:
                value = self._call(task, args, kwargs)
        except SystemExit as error:
            failure: BaseException | None = error if error.code not in (None, 0) else None
        except Exception as error:  # noqa: BLE001 - raised again, unless a rule says otherwise
            failure = error
        else:
            failure = None
            if refused is not None:
                raise self._error(refused.because, refused.exit_code)
        if failure is None:
            self._finish()
            return value
        following = self._what_follows(failure)
        if following is failure:
            raise failure
        raise following from None

    def _finish(self) -> None:
        finished = Ending.of(ExitCode.FINISHED)
        self._job.record_end(finished)
        self._job.end(finished, finished.text)

    def follow(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the task on another rank than 0; rank 0 decides how all ranks end."""
        self._backend.task.remove_result()
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
            self._backend.task.store_error(state.because)
            os._exit(state.exit_code)

    def _call(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        threading.Thread(target=self._watch, name="forge-deadline", daemon=True).start()
        try:
            return task(*args, **kwargs)
        finally:
            # No interruption from here on, while a result is stored or the job is requeued.
            stopping.hold_interrupts(is_held=True)
            self._has_left.set()
            self._decider.acquire()  # blocks forever if the other thread is ending this process

    def _warn_of_others(self) -> None:
        """Only warn: submitit has already executed the files in its folder."""
        for path in (self._backend.task.folder, self._backend.task.submitted):
            found = foreign(path)
            if found:
                messages.warn(
                    f"{path} {found}. submitit executes files from this folder, with your rights,"
                    " at each start of this job: remove the write permission of others"
                    " (`chmod -R go-w`), or choose another folder."
                )
                return

    # -- deciding ------------------------------------------------------------------------------

    def _what_follows(self, failure: BaseException) -> BaseException:
        """Requeue if that is due; returns the exception with which this process ends."""
        ending, text = self._ending(failure)
        has_saved, is_stop = isinstance(failure, SystemExit), self._is_stop(failure)
        problem = ""
        try:
            ending = self._explained(ending, has_saved=has_saved) if is_stop else ending
        except SlurmError as error:
            problem = f"cannot ask Slurm why the job was stopped: {error}"
        self._job.end_attempt()
        self._job.record_end(ending)
        if not problem:
            decision = self._backend.decide(ending)
            problem = decision.because
            if decision.starts_again:
                try:
                    return self._start_again(decision)
                except SlurmError as error:
                    problem = f"could not be requeued: {error}"
        if not is_stop and not has_saved:
            self._end(ending, problem)
            return failure
        because = "it was cancelled" if ending.reason is Reason.cancelled else problem
        return self._give_up(ending, f"{text}; not started again: {because}")

    def _is_stop(self, failure: BaseException) -> bool:
        """Whether the task has ended because of a signal."""
        received = self._handler.signal_received
        if not isinstance(failure, SystemExit):
            return received is not None
        is_requeue = failure.code == ExitCode.REQUEUE
        return is_requeue or (received is not None and failure.code == 128 + received)

    def _ending(self, failure: BaseException) -> tuple[Ending, str]:
        """The end of the task, and a text that describes it."""
        said: Reason | None = None
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else 1
            text = failure.text if isinstance(failure, Exit) else f"sys.exit({failure.code!r})"
            said = failure.reason if isinstance(failure, Exit) else None
        else:
            # After a signal: it killed a helper process first, or caused the error.
            has_signal = self._handler.signal_received is not None
            code = self._handler.exit_code if has_signal else 1
            text = f"{type(failure).__name__}: {failure}"
        ending, task = Ending.of(int(code), said, text), self._backend.task
        if said is Reason.rank_lost and (rank := task.raised_elsewhere(_RAISED_S)):
            text = f"rank {rank} raised an error: see its log, or job.task({rank}).exception()"
            ending = Ending.of(1, text=text)
        return ending, text

    def _explained(self, ending: Ending, *, has_saved: bool) -> Ending:
        """The end with its reason; without a save it counts as a failure. Raises SlurmError."""
        reason = self._backend.why(self._handler.signal_received, ending.code)
        is_final = reason in (Reason.cancelled, Reason.interrupted)
        if has_saved or is_final or self._backend.is_requeued:
            return ending.imposed(reason)
        return Ending.of(ExitCode.FORCED)

    def _start_again(self, decision: Decision) -> Exit:
        how = "by Slurm" if self._backend.is_requeued else decision.because
        leaving = stopping.leave(self._backend.restart_code, f"requeued: {how}")
        self._backend.start_again(decision)
        messages.say(f"Requeued job {self._job.state.job}: {how}")
        return leaving

    def _end(self, ending: Ending, because: str) -> None:
        self._job.end(ending, because, is_requeued=self._backend.is_requeued)

    def _give_up(self, ending: Ending, because: str) -> JobError:
        self._end(ending, because)
        return self._error(because, ending.code)

    def _error(self, because: str, code: int) -> JobError:
        return JobError(
            f"{because}. Its checkpoints are in {self._job.directory}; to resume:\n"
            f"  {self._backend.command}",
            code,
        )

    # -- a task that does not return -----------------------------------------------------------

    def _watch(self) -> None:
        """Wait for a stop, then decide if the main thread does not return in time."""
        while not self._handler.should_shutdown():
            if self._has_left.wait(_LOOK_S):
                return
        limit_s = self._handler.timeout_sec
        if limit_s:
            self._has_left.wait(limit_s - min(MARGIN_S, limit_s / 4))
            if not self._has_left.is_set() and self._decider.acquire(blocking=False):
                self._end_by_force()

    def _end_by_force(self) -> None:
        """End without the main thread, which is in a call that hangs, or swallows `Exit`."""
        self._handler.cancel_forced_exit()
        with contextlib.suppress(OSError), open(2, "w", closefd=False) as output:
            faulthandler.dump_traceback(output, all_threads=True)
        code = int(ExitCode.FORCED)
        following: BaseException
        if self._job.trainings.saved_step() < 0:
            ending = Ending.of(code)
            self._job.record_end(ending)
            text = "the task did not exit in time, and has no checkpoint to resume from"
            following = self._give_up(ending, text)
        else:
            following = self._what_follows(JobError("the task did not end", code))
        if isinstance(following, Exit):
            code = self._backend.restart_code
        else:
            self._backend.task.store_error(str(following))
        processes.kill_descendants()
        os._exit(code)
