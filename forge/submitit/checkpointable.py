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
import signal
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
from forge.errors import AlreadyRequeued, Exit, ExitCode, JobError, NoSuchJob, Reason, SlurmError
from forge.filesystem.files import make_directory
from forge.filesystem.foreign import foreign
from forge.job.record import Record
from forge.job.requeue import Decision, Ending, decide_restart
from forge.jobdir import job_dir, ledger
from forge.jobdir.job_files import RANK, RANKS, forge_dir
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import RequeueLimits
from forge.process import processes
from forge.shutdown import stopping
from forge.slurm.own_job import ASK_S
from forge.submitit import backends
from forge.submitit.backends import Backend

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
        backend = backends.current()
        if backend is None:
            return self.task(*args, **kwargs)
        directory = Path(self.directory.replace("%j", backend.job))
        if self._is_in_folder:
            directory = backend.folder / directory
        if backend.size > 1:
            names = {RANK: str(backend.rank), RANKS: str(backend.size)}
            os.environ.update(names | backend.world().variables())
        attempt = _Attempt(self.policy, directory.absolute(), backend)
        return (attempt.follow if backend.rank else attempt.run)(self.task, args, kwargs)

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


def _is_decided(state: JobState | None) -> bool:
    """Whether rank 0 has decided what follows the end of this start."""
    return state is not None and state.state is not State.running


def _has_failed(state: JobState | None) -> TypeGuard[JobState]:
    """Whether rank 0 has ended the job."""
    return state is not None and state.state in (State.stopped, State.failed)


class _Attempt:
    """One start of a job: handles signals, runs the task, decides on a restart."""

    def __init__(self, policy: Policy, directory: Path, backend: Backend) -> None:
        # First of all: until here submitit's handlers ignore SIGTERM.
        name = backend.own_signal.name.removeprefix("SIG")
        policy.signal.actions.setdefault(name, SignalAction.requeue)
        self._handler = stopping.install(policy, forge_dir(directory))
        stopping.allow(3 * ASK_S + MARGIN_S)
        job_dir.place(directory, backend.command)
        stopping.has_job(directory)
        self._policy = policy
        self._directory = directory
        self._backend = backend
        self._record = Record(directory, backend.job, backend.start)
        self._has_left = threading.Event()
        self._decider = threading.Lock()
        """Held by the thread that decides whether the job is restarted."""

    def run(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the value of the task; otherwise raises, or exits for a restart."""
        value: Any = None
        refusal: JobError | None = None
        try:
            refusal = self._begin()
            if refusal is None:
                value = self._call(task, args, kwargs)
        except SystemExit as error:
            failure: BaseException | None = error if error.code not in (None, 0) else None
        except Exception as error:  # noqa: BLE001 - raised again, unless a rule says otherwise
            failure = error
        else:
            failure = None
        if refusal is not None:
            raise refusal
        if failure is None:
            self._record.write(State.finished)
            return value
        following = self._what_follows(failure)
        if following is failure:
            raise failure
        raise following from None

    def follow(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the task on another rank than 0; rank 0 decides how all ranks end."""
        self._backend.result.unlink(missing_ok=True)
        threading.Thread(target=self._watch_rank_0, name="forge-rank-0", daemon=True).start()
        try:
            return task(*args, **kwargs)
        except SystemExit:
            until = time.monotonic() + MARGIN_S
            while not _is_decided(state := self._record.of_this_start()):
                if time.monotonic() > until:
                    break
                time.sleep(_LOOK_S)
            if _has_failed(state):
                raise JobError(state.because, state.code) from None
            raise
        finally:
            self._has_left.set()

    def _watch_rank_0(self) -> None:
        """Wait until rank 0 has begun; exit if it refuses to, since rendezvous would time out."""
        while (state := self._record.of_this_start()) is None:
            if self._has_left.wait(_BEGIN_LOOK_S):
                return
        if _has_failed(state) and not self._has_left.is_set():
            self._backend.store_error(state.because)
            os._exit(state.code or 1)

    def _call(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        threading.Thread(target=self._watch, name="forge-deadline", daemon=True).start()
        try:
            return task(*args, **kwargs)
        finally:
            # No interruption from here on, while a result is stored or the job is requeued.
            stopping.hold_interrupts(is_held=True)
            self._has_left.set()
            self._decider.acquire()  # blocks forever if the other thread is ending this process

    # -- the job's own record ------------------------------------------------------------------

    def _begin(self) -> JobError | None:
        """Take over the counts; returns an error if the job must not be started again."""
        self._warn_of_others()
        make_directory(forge_dir(self._directory))
        # The result of an earlier start is stale. submitit also fails if a kill while it stored a
        # result left a temporary file.
        result = self._backend.result
        for path in (result, result.with_suffix(f"{result.suffix}.save_tmp")):
            path.unlink(missing_ok=True)
        before = self._record.read()
        if before is not None and (before.ends_next_start or not before.state.is_final):
            self._record.counts = before.counts
        else:
            self._record.counts.best_step = self._saved_step()
        if before is not None and before.ends_next_start:
            self._record.write(before.state, before.because, before.code, ends_next_start=True)
            return JobError(before.because, before.code)
        if before is not None and before.state is State.running:
            decision = self._decide(Ending.of(-signal.SIGKILL))
            if not decision.starts_again:
                because = (
                    "an earlier start did not record its end, which counts as a kill:"
                    f" {decision.because}"
                )
                return self._give_up(because, 128 + signal.SIGKILL)
        self._record.write(State.running)
        return None

    def _warn_of_others(self) -> None:
        """Only warn: submitit has already executed the files in its folder."""
        for path in (self._backend.folder, self._backend.submitted):
            found = foreign(path)
            if found:
                messages.warn(
                    f"{path} {found}. submitit executes files from this folder, with your rights,"
                    " at each start of this job: remove the write permission of others"
                    " (`chmod -R go-w`), or choose another folder."
                )
                return

    def _saved_step(self) -> int:
        """The last saved step of all Runs of the job; -1 before the first checkpoint."""
        return ledger.saved_steps(self._directory, self._policy.checkpoint.dir)

    # -- deciding ------------------------------------------------------------------------------

    def _what_follows(self, failure: BaseException) -> BaseException:
        """Requeue if that is due; returns the exception with which this process ends."""
        received = self._handler.signal_received
        is_stop = received is not None
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else 1
            text = failure.text if isinstance(failure, Exit) else f"sys.exit({failure.code!r})"
            said = failure.reason if isinstance(failure, Exit) else None
            is_stop = code in (ExitCode.REQUEUE, None if received is None else 128 + received)
        else:
            # After a signal: it killed a helper process first, or caused the error.
            code = self._handler.exit_code if is_stop else 1
            text, said = f"{type(failure).__name__}: {failure}", None
        ending, is_back = Ending.of(int(code), said, text), False
        if said is Reason.rank_lost and (rank := self._backend.raised_elsewhere(_RAISED_S)):
            text = f"rank {rank} raised an error: see its log, or job.task({rank}).exception()"
            ending = Ending.of(1, text=text)
        try:
            if is_stop:
                why = self._backend.why(received, ending.code)
                has_saved = isinstance(failure, SystemExit)
                is_final = why in (Reason.cancelled, Reason.interrupted)
                ending = (
                    ending.imposed(why) if has_saved or is_final else Ending.of(ExitCode.FORCED)
                )
            decision = self._decide(ending)
            if decision.starts_again:
                return self._start_again(decision, must_ask=not is_stop)
        except AlreadyRequeued:
            is_back = True
            decision = self._decide(Ending.of(ExitCode.REQUEUE))
            if decision.starts_again:
                self._record.write(State.queued, "by Slurm")
                return stopping.leave(self._backend.restart_code, "requeued by Slurm")
        except SlurmError as problem:
            decision = Decision(
                starts_again=False, because=f"cannot ask Slurm why the job was stopped: {problem}"
            )
        if not is_stop and not isinstance(failure, SystemExit):
            self._record.write(State.failed, decision.because, ending.code)
            return failure
        is_cancelled = ending.reason is Reason.cancelled
        because = "it was cancelled" if is_cancelled else decision.because
        return self._give_up(f"{text}; not started again: {because}", ending.code, is_back=is_back)

    def _start_again(self, decision: Decision, *, must_ask: bool) -> Exit:
        """Requeue; first writes the job's record, since Slurm can end this process then."""
        if must_ask and self._backend.why(None, int(ExitCode.REQUEUE)) is Reason.cancelled:
            raise NoSuchJob("it was cancelled")
        leaving = stopping.leave(self._backend.restart_code, f"requeued: {decision.because}")
        self._record.write(State.queued, decision.because)
        self._backend.requeue()
        messages.say(f"Requeued job {self._backend.job}: {decision.because}")
        return leaving

    def _decide(self, ending: Ending) -> Decision:
        limits = RequeueLimits.of(self._policy.requeue)
        counts = self._record.counts
        decision = decide_restart(ending, counts, limits, self._saved_step())
        refusal = self._backend.refusal(counts.restarts) if decision.starts_again else ""
        return (
            Decision(starts_again=False, because=f"{decision.because}; {refusal}")
            if refusal
            else decision
        )

    def _give_up(self, because: str, code: int, *, is_back: bool = False) -> JobError:
        # A job that is requeued by hand after its end gets new budgets.
        self._record.write(State.stopped, because, code, ends_next_start=is_back)
        return JobError(
            f"{because}. Its checkpoints are in {self._directory}; to resume:\n"
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
        if self._saved_step() < 0:
            following = self._give_up(
                "the task did not exit in time, and has no checkpoint to resume from", code
            )
        else:
            following = self._what_follows(JobError("the task did not end", code))
        if isinstance(following, Exit):
            code = self._backend.restart_code
        else:
            self._backend.store_error(str(following))
        processes.kill_descendants()
        os._exit(code)
