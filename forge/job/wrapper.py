"""The wrapper of one job, below one of forge's launchers, from the job's first start to its last.

The wrapper restarts the job's task until it has finished, was stopped, or has reached a limit of
the policy. Standard library only: the wrapper starts in milliseconds, outlives the task, and works
outside a container.

    starts the task ─► waits for its end ─► asks the backend how and why it ended
         ▲                                         │
         └── within the limits for this reason? ◄──┘  (requeue.py)

A backend starts and stops the tasks (`backend.py`). The wrapper and the supervisors hold the lock
in the job's directory as long as a process of the job can be alive.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge import messages
from forge.errors import ExitCode, Reason, Untrusted
from forge.filesystem import foreign
from forge.filesystem.files import open_file
from forge.filesystem.locks import take_lock
from forge.job.backend import TaskBackend
from forge.job.ending import Ending
from forge.job.hangs import Hangs
from forge.job.job import Job, Trainings, print_line
from forge.job.requeue import Decision
from forge.job.supervisor import MARGIN_S, ORPHANED_S
from forge.job.task import Task
from forge.jobdir import cancel_request, code, node_fault, rank_report
from forge.jobdir.cancel_request import CancelRequest
from forge.jobdir.job_files import (
    ATTEMPT,
    JOB_DIR,
    LOCK,
    OUTPUT,
    RANK,
    RANKS,
    RECOVERS,
    REPORT,
    RESULT,
    RESULT_JSON,
    RETURN_CODE,
    SAVE_WITHIN,
    TOKEN,
    VERDICT,
    forge_dir,
    output_of,
    suffix,
)
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import JobPlan
from forge.process import children, processes
from forge.process.world import RankInfo

_SHOWN_FILES = 5
"""The most changed source files that a message names."""
_LOOK_S = 1.0
"""Seconds between two checks whether a full disk has room again."""
_REQUEST_S = 2.0
"""Seconds between two looks for a request to cancel the job."""
_CLAIM_S = 30.0
"""Seconds after the task's deadline in which an earlier wrapper's processes can still exit."""


def job_of(
    directory: Path, plan: JobPlan, say: Callable[[str], None] = print_line, **names: str
) -> Job:
    """The job of a plan; `names` are the fields of its state that name the start."""
    os.environ.pop(RANK, None)  # set by a job around this one
    trainings = Trainings([directory], plan.checkpoint_dir)
    named: dict[str, Any] = {**names}
    has_steps = Task.of(directory, plan).is_main
    state = JobState(state=State.queued, has_steps=has_steps, **named)
    return Job(directory, plan.requeue, trainings, state, say)


def patience_s(plan: JobPlan) -> float:
    """Seconds for the other ranks to exit, once a rank has failed."""
    return (plan.timeout_s or ORPHANED_S) + 2 * MARGIN_S


class Wrapper:
    """The life of a job in this process."""

    def __init__(self, plan: JobPlan, backend: TaskBackend) -> None:
        self._plan, self._backend, self._job = plan, backend, backend.job
        self._forge = forge_dir(self._job.directory)
        self._hangs = Hangs(self._job, plan.num_ranks, plan.hang)
        self._is_stopping = False
        """Whether the state says that the job was asked to stop."""
        self._cancelled: CancelRequest | None = None
        self._next_look = 0.0
        """Monotonic time of the next look for a request to cancel the job."""

    def run(self) -> int:
        """Run all attempts; returns the exit code of the last, 128 + N for signal N."""
        children.adopt_orphans()
        self._backend.listen()
        self._claim()
        try:
            return self._run()
        except OSError as error:  # nothing was read or written there
            if problem := foreign.replaced(self._job.directory):
                raise Untrusted(problem) from error
            raise

    def _run(self) -> int:
        self._end_strays()
        ending = self._backend.take_over()
        while True:
            self._look()
            stop = self._backend.stopped_by
            if stop is not None and not (ending is not None and ending.is_finished):
                ending = Ending.of(128 + signal.SIGTERM).imposed(stop)  # nothing was started
            ending = ending or self._attempt()
            decision = self._backend.decide(ending)
            if not decision.starts_again or self._backend.stopped_by is not None:
                return self._end(ending, decision.because)
            code = self._start_again(ending, decision)
            if code is not None:
                return code
            ending = None

    def _start_again(self, ending: Ending, decision: Decision) -> int | None:
        """Prepare the next start; the exit code of this process if the job starts elsewhere."""
        restarts, because = self._job.counts.restarts, decision.because
        reason = ending.reason.name
        self._job.record("requeue", because=because, reason=reason, restarts=restarts)
        when = f" in {decision.pause_s:.0f} s" if decision.pause_s else ""
        self._job.say(f"{because}: restarting{when} (restart {restarts})")
        self._job.write(State.starting, because)
        code = self._backend.restart_elsewhere(ending, decision)
        if code is None and not self._backend.is_queue:
            self._pause(decision.pause_s)
        return code

    def _end(self, ending: Ending, because: str) -> int:
        if self._cancelled is not None and ending.state is State.stopped:
            because = f"cancelled by {self._cancelled.by}"
        if not ending.is_finished:
            self._job.say(f"{ending.state.value}: {because}")
        return self._job.end(ending, because, is_requeued=self._backend.is_requeued)

    def _look(self) -> None:
        """Act on signals and requests; tell the launcher once that the job was asked to stop."""
        self._backend.look()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _REQUEST_S
            self._look_for_cancel()
        stop = self._backend.stopped_by
        if stop is not None and not self._is_stopping:
            self._is_stopping = True
            self._job.write(State.stopping, stop.value)

    def _look_for_cancel(self) -> None:
        request, before = cancel_request.read(self._job.directory), self._cancelled
        if request is None or (before is not None and before.is_now >= request.is_now):
            return
        self._cancelled = request
        self._job.set_backend(cancelled_by=request.by)
        self._job.record("cancel", by=request.by, is_now=request.is_now)
        self._backend.cancel(is_now=request.is_now)

    def _pause(self, seconds: float) -> None:
        """Wait before the next start; less if the job is stopped or a full disk has room again."""
        deadline = time.monotonic() + seconds
        had_room = self._has_room()
        while self._backend.stopped_by is None and (left_s := deadline - time.monotonic()) > 0:
            if not had_room and self._has_room():
                break
            select.select([self._backend.reader], [], [], min(left_s, _LOOK_S))
            self._look()

    def _has_room(self) -> bool:
        """Whether the disk has room for twice the largest checkpoint; a quota is not checked."""
        directory = self._job.directory / self._plan.checkpoint_dir
        steps = [*directory.glob("step_*"), *directory.glob("*/step_*")]  # of a named Run
        try:
            sizes = [sum(one.stat().st_size for one in step.iterdir()) for step in steps]
            free = shutil.disk_usage(self._job.directory).free
            return bool(free >= 2 * max(sizes, default=0))
        except OSError:  # a checkpoint is just being removed
            return False

    # -- the directory -------------------------------------------------------------------------

    def _claim(self) -> None:
        """Take the lock; wait for the processes of a killed wrapper to exit."""
        foreign.note_claim(self._job.directory)
        self._lock = open_file(self._forge / LOCK, os.O_RDWR | os.O_CREAT)
        leaving_s = (self._plan.timeout_s or ORPHANED_S) + MARGIN_S
        deadline = time.monotonic() + leaving_s + _CLAIM_S
        is_told = False
        while not take_lock(self._lock):
            if not is_told:
                self._job.say("waiting for processes of an earlier start to save and exit")
                is_told = True
            if time.monotonic() > deadline:
                self._job.say(
                    f"processes of an earlier start still hold {self._forge / LOCK}. Are they"
                    " suspended, or in a debugger? Continue or kill them, and run the sweep's"
                    " command again."
                )
                sys.exit(int(ExitCode.IN_USE))
            # Poll: no call waits for a lock and for signals at the same time.
            select.select([self._backend.reader], [], [], 0.05)
            self._backend.look()
            if self._backend.stopped_by is not None:
                sys.exit(int(ExitCode.TERMINATED))  # we have started nothing yet

    def _end_strays(self) -> None:
        """Kill processes of this directory that are no longer descendants.

        The mark alone is not enough: the jobs in a copy of the directory have it, too.
        """
        for _ in range(20):  # a single pass misses a process that was just started
            pids = [one for one in processes.marked(TOKEN, self._plan.token) if self._is_here(one)]
            if not pids:
                break
            for pid in pids:
                processes.send(pid, signal.SIGKILL)
            processes.wait_gone(pids, 1.0)

    def _is_here(self, pid: int) -> bool:
        """Whether a process was started in this job's directory."""
        try:
            directory = processes.variable(pid, JOB_DIR)
            return directory is not None and os.path.samefile(directory, self._job.directory)
        except OSError:  # that directory was moved or removed
            return False

    # -- an attempt ----------------------------------------------------------------------------

    def _attempt(self) -> Ending:
        self._backend.prepare()
        if problem := foreign.replaced(self._job.directory):
            raise Untrusted(problem)
        job, place = self._job, (self._job.directory, self._plan)
        job.begin_attempt()
        ending = None
        if job.counts.recovery is not None:
            ending = self._stage(Task.recovery(*place, job.counts.recovery, job.attempt - 1))
            if not ending.is_finished:
                ending = replace(ending, text=f"the rule's recovery command: {ending.text}")
            else:
                job.set_counts(replace(job.counts, recovery=None))
                ending = None
        task = Task.of(*place)
        ending = ending or self._stage(task)
        job.end_attempt()
        if not task.is_main:  # main says more itself
            how = "" if ending.is_finished else f": {ending.text}"
            job.say(f"attempt {job.attempt} {ending.ended_as}{how}")
        return ending

    def _stage(self, task: Task) -> Ending:
        """Run a task on all ranks, until all of its processes have ended."""
        job = self._job
        for path in self._forge.iterdir():
            if path.name.startswith(
                (REPORT, VERDICT, RESULT, RESULT_JSON, node_fault.FILE)
            ):  # of every rank
                path.unlink(missing_ok=True)
        self._hangs.begin_attempt(job.attempt)
        output = open_file(job.directory / OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sizes = self._output_sizes()
        job.record_start(task.kind)
        if not (task.is_main or task.kind == "recovery"):
            self._mark_start(sizes)
        self._job.write(State.running, job.state.because)
        self._backend.start(task, self._environment(task), output)
        os.close(output)
        # Only now, so that the task does not wait; a later edit is not in the task's process.
        changed = code.changed_files(self._plan.code) if task.is_main else []
        self._wait()
        processes.kill_descendants()  # orphans of a supervisor that was killed
        self._end_strays()
        ending = self._explain_by_code(self._hangs.explain(self._backend.ending()), changed)
        if self._cancelled is not None:
            ending = ending.imposed(Reason.cancelled, f"cancelled by {self._cancelled.by}")
        report = rank_report.read(job.directory, ending.rank)
        job.record_end(ending, report.section if report is not None else "")
        return ending

    def _output_sizes(self) -> list[int]:
        """Bytes of each rank's output so far."""
        sizes = []
        for rank in range(self._plan.num_ranks):
            path = self._job.directory / f"{OUTPUT}{suffix(rank)}"
            sizes.append(path.stat().st_size if path.exists() else 0)
        return sizes

    def _mark_start(self, sizes: list[int]) -> None:
        """Mark the start of an attempt of a command in each rank's output."""
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        mark = f"==== forge: attempt {self._job.attempt}, {at} ====\n"
        for rank, size in enumerate(sizes):
            with contextlib.suppress(OSError):  # a full disk
                output = output_of(self._job.directory, rank)
                try:
                    os.write(output, ("\n" * (size > 0) + mark).encode())
                finally:
                    os.close(output)

    def _wait(self) -> None:
        while not self._backend.has_ended():
            self._hangs.look(self._backend.ended_ranks())
            select.select([self._backend.reader], [], [], self._backend.tick())
            self._look()
        self._look()  # signals that came while the last task ended

    def _explain_by_code(self, ending: Ending, changed: list[str]) -> Ending:
        """The end of an attempt, with the changed files if it failed with edited code."""
        if ending.reason is not Reason.failed or not changed:
            return ending
        names = [one.removeprefix(os.path.join(self._plan.cwd, "")) for one in changed]
        files = messages.truncate_list(names, _SHOWN_FILES)
        text = f"{ending.text}; the code changed since the job was submitted: {files}"
        return replace(ending, reason=Reason.code_changed, text=text)

    def _environment(self, task: Task) -> dict[str, str]:
        """The environment of a task."""
        job = self._job
        environment: dict[str, str] = os.environ | self._plan.environment
        for name in (SAVE_WITHIN, RANK, RANKS, RECOVERS, RETURN_CODE, *RankInfo().variables()):
            environment.pop(name, None)  # set by a job around this one
        if job.counts.unsaved_s:
            environment[SAVE_WITHIN] = f"{job.counts.unsaved_s / 2:.3f}"
        own: dict[str, Any] = {
            TOKEN: self._plan.token,
            JOB_DIR: job.directory,
            ATTEMPT: job.attempt,
            "FORGE_RESTART_COUNT": job.counts.restarts,
        }
        return environment | {name: str(value) for name, value in own.items()} | task.variables
