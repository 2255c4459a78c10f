"""The wrapper of one job, on any launcher, from the job's first start to its last.

The wrapper restarts the job's task until it has finished, was stopped, or has reached a limit of
the policy. Standard library only: the wrapper starts in milliseconds, outlives the task, and works
outside a container.

    starts the task ─► waits for its end ─► reads how it ended
         ▲                                         │
         └── within the limits for this reason? ◄──┘  (requeue.py)

`local.py` and `slurm/wrapper.py` start and stop tasks. The wrapper and the supervisors hold the
lock in the job's directory as long as a process of the job can be alive.

One module, since claiming, starting, waiting and deciding share the state of an attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge import messages
from forge.errors import ExitCode, Reason, Untrusted
from forge.filesystem import claimed
from forge.filesystem.files import make_directory, open_file
from forge.filesystem.locks import take_lock
from forge.job import attempts
from forge.job.hangs import Hangs
from forge.job.requeue import Decision, Ending, decide_restart, spread
from forge.job.supervisor import MARGIN_S, ORPHANED_S
from forge.jobdir import code, ledger, node_fault, plan, verdict
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
    RETURN_CODE,
    SAVE_WITHIN,
    TOKEN,
    VERDICT,
    forge_dir,
    job_ledger,
    suffix,
)
from forge.jobdir.job_state import Counts, JobState, State
from forge.jobdir.plan import ExecPlan
from forge.jobdir.verdict import Verdict
from forge.process import processes
from forge.process.world import RankInfo

_SHOWN_FILES = 5
"""The most changed source files that a message names."""
_LOOK_S = 1.0
"""Seconds between two checks whether a full disk has room again."""
_CLAIM_S = 30.0
"""Seconds after the task's deadline in which an earlier wrapper's processes can still exit."""


class Job(ABC):
    """The wrapper's state, and the life of a job."""

    def __init__(self, directory: Path) -> None:
        os.environ.pop(RANK, None)  # set by a job around this one
        self.directory = directory
        self.forge = forge_dir(directory)
        self.plan = plan.read(directory)
        self.counts = Counts()
        ranks, action = self.plan.num_ranks, self.plan.hang
        self.hangs = Hangs(directory, ranks, action, self._record, self._print, self._note_hang)
        self._nodes = os.uname().nodename
        """The nodes on which the tasks run, as Slurm writes them: `n[1-2]`."""
        self._because = ""
        self._asked: Reason | None = None
        self._began = 0.0
        """When the last attempt began; Unix time, like the times in the ledger."""
        self._took_s = 0.0
        """Seconds that the last attempt took."""
        self._before = 0
        """Number of the last attempt in the ledger when it began."""
        self._number = 1
        """Number of the attempt, over all starts of the job."""
        self._recovery: dict[str, int] | None = None
        """`Counts.recovery` while that recovery command is running; else None."""
        self._changed: list[str] = []
        """Source files that differed from those of the submission when the attempt began."""

    def run(self) -> int:
        """Run all attempts; returns the exit code of the last, 128 + N for signal N."""
        processes.adopt_orphans()
        names = ("TERM", "HUP", "INT", "QUIT", "USR1", "USR2", "CHLD")
        self._reader = processes.listen(signal.Signals[f"SIG{name}"] for name in names)
        self._claim()
        try:
            return self._run()
        except OSError as error:  # nothing was read or written there
            if problem := claimed.problem(self.directory):
                raise Untrusted(problem) from error
            raise

    def _run(self) -> int:
        ending = self._take_over()
        while True:
            self._look_for_parent()
            is_finished = ending is not None and ending.is_finished
            if self._asked is not None and not is_finished:  # before anything was started
                ending = Ending.of(128 + signal.SIGTERM).imposed(self._asked)
            ending = ending or self._attempt()
            decision = self._decide(ending)
            if not decision.starts_again or self._asked is not None:
                return self._end(ending, decision)
            self._record("requeue", because=decision.because, restarts=self.counts.restarts)
            self._because = decision.because
            when = f" in {decision.pause_s:.0f} s" if decision.pause_s else ""
            self._print(f"{decision.because}: restarting{when} (restart {self.counts.restarts})")
            self._write_state(State.starting, self._because)
            code = self._move_on(ending, decision.pause_s)
            if code is not None:
                return code
            ending = None

    # -- what a subclass implements ------------------------------------------------------------

    @abstractmethod
    def _take_over(self) -> Ending | None:
        """Continue with the counts of an earlier wrapper; the end of its attempt, if any."""

    @abstractmethod
    def _start(self, output: int) -> int:
        """Start the task, with its output into `output`; the pid of the child to wait for."""

    @abstractmethod
    def _wait(self, child: int, began: float) -> int:
        """Wait until the attempt has ended; `began` is monotonic. Returns the wait status."""

    @abstractmethod
    def _ending(self, status: int) -> Ending:
        """The end of the attempt, from the wait status of the child."""

    def _move_on(self, ending: Ending, pause_s: float) -> int | None:
        """Exit with this code, since the job starts elsewhere; None to restart it here."""
        self._pause(pause_s)
        return None

    @abstractmethod
    def _drain_signals(self) -> None:
        """Act on the signals that have come."""

    def _pause(self, seconds: float) -> None:
        """Wait before the next start; less if the job is stopped or a full disk has room again."""
        deadline = time.monotonic() + seconds
        had_room = self._has_room()
        while self._asked is None and (left_s := deadline - time.monotonic()) > 0:
            if not had_room and self._has_room():
                break
            select.select([self._reader], [], [], min(left_s, _LOOK_S))
            self._drain_signals()
            self._look_for_parent()

    def _has_room(self) -> bool:
        """Whether the disk has room for twice the largest checkpoint; a quota is not checked."""
        directory = self.directory / self.plan.checkpoint_dir
        steps = [*directory.glob("step_*"), *directory.glob("*/step_*")]  # of a named Run
        try:
            sizes = [sum(one.stat().st_size for one in step.iterdir()) for step in steps]
            return bool(shutil.disk_usage(directory).free >= 2 * max(sizes, default=0))
        except OSError:  # a checkpoint is just being removed
            return False

    def _is_cut_short(self, *, has_boundary: bool) -> bool:
        """Whether the cluster ended an attempt before it could save anything."""
        return False

    def _look_for_parent(self) -> None:  # noqa: B027 - optional
        """Stop if the process that started us has ended."""

    # -- the directory -------------------------------------------------------------------------

    def _claim(self) -> None:
        """Take the lock; wait for the processes of a killed wrapper to exit."""
        claimed.note(self.directory)
        self._lock = open_file(self.forge / LOCK, os.O_RDWR | os.O_CREAT)
        leaving_s = (self.plan.timeout_s or ORPHANED_S) + MARGIN_S
        deadline = time.monotonic() + leaving_s + _CLAIM_S
        is_told = False
        while not take_lock(self._lock):
            if not is_told:
                self._print("waiting for processes of an earlier start to save and exit")
                is_told = True
            if time.monotonic() > deadline:
                self._print(
                    f"processes of an earlier start still hold {self.forge / LOCK}. Are they"
                    " suspended, or in a debugger? Continue or kill them, and run the sweep's"
                    " command again."
                )
                sys.exit(int(ExitCode.IN_USE))
            # Poll: no call waits for a lock and for signals at the same time.
            select.select([self._reader], [], [], 0.05)
            self._look_while_waiting()

    def _look_while_waiting(self) -> None:  # noqa: B027 - optional
        """Called between two tries to take the lock, while we have started nothing yet."""

    def _end_strays(self) -> None:
        """Kill processes that have this job's mark and are no longer descendants."""
        for _ in range(20):  # a single pass misses a process that was just started
            pids = processes.marked(TOKEN, self.plan.token)
            if not pids:
                break
            for pid in pids:
                processes.send(pid, signal.SIGKILL)
            processes.wait_gone(pids, 1.0)

    def _saved_step(self) -> int:
        """Number of steps that all Runs of the job have saved; -1 before the first checkpoint."""
        return ledger.saved_steps(self.directory, self.plan.checkpoint_dir)

    def _decide(self, ending: Ending) -> Decision:
        """Whether the job starts again, from the files that the last attempt has written."""
        decision = decide_restart(
            ending,
            self.counts,
            self.plan.requeue,
            self._saved_step(),
            has_run=any((self.forge / "ledger").glob("attempt_*")),
            is_cut_short=self.plan.exec is None
            and self._is_cut_short(has_boundary=ledger.has_stepped(self.directory, self._began)),
            took_s=self._took_s,
        )
        counts = self.counts
        counts.unsaved_s = self._took_s if counts.no_progress + counts.early_evictions > 0 else 0.0
        return spread(decision, self.plan.token, counts.restarts)

    def _write_state(self, state: State, because: str = "", **more: Any) -> None:
        content = JobState(
            state=state,
            because=because,
            began=self._began,
            counts=self.counts,
            nodes=self._nodes,
            has_steps=self.plan.exec is None,
            **more,
        )
        try:
            content.write(self.directory)
        except OSError as error:  # a full disk must not end the job
            self._print(f"state.json cannot be written: {error}")

    def _note_hang(self, text: str) -> None:
        """Write a hang that is only logged into state.json, so that the launcher shows it."""
        if self._asked is None:  # otherwise the state says that the job stops
            self._write_state(State.running, self._because, hang=text)

    def _record(self, kind: str, **values: Any) -> None:
        """Add a line to the job's ledger."""
        line = json.dumps({"t": round(time.time(), 3), "kind": kind, **values}) + "\n"
        path = job_ledger(self.directory)
        try:
            make_directory(path.parent)
            fd = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
        except OSError as error:
            self._print(f"the job's history, {path}, cannot be written: {error}")

    def _print(self, text: str) -> None:
        """Print a line into the job's output."""
        with contextlib.suppress(OSError):  # a full disk must not end the job
            os.write(2, messages.escape(f"forge: {text}\n", "\n\t").encode())

    # -- an attempt ----------------------------------------------------------------------------

    def _attempt(self) -> Ending:
        if problem := claimed.problem(self.directory):
            raise Untrusted(problem)
        self._began, began = time.time(), time.monotonic()
        self._number = attempts.next_number(self.directory)
        if self.plan.exec is not None:
            attempts.begin(self.directory, self.plan.num_ranks, self._number)
        ending = None
        if self.counts.recovery is not None:
            self._recovery = self.counts.recovery
            recovered = self._stage(began)
            self._recovery = None
            if recovered.is_finished:
                self.counts.recovery = None
            else:
                text = f"the rule's recovery command: {recovered.text}"
                ending = replace(recovered, text=text)
        ending = ending or self._stage(began)
        self._took_s = time.monotonic() - began
        if self.plan.exec is not None:
            how = "" if ending.is_finished else f": {ending.text}"
            self._print(f"attempt {self._number} {ending.ended_as}{how}")
        return ending

    def _stage(self, began: float) -> Ending:
        """Start the task, or a recovery command, and wait until all its processes have ended."""
        for path in self.forge.iterdir():
            if path.name.startswith(
                (REPORT, VERDICT, RESULT, node_fault.FILE)
            ):  # the files of every rank
                path.unlink(missing_ok=True)
        self.hangs.begin(self._number)
        output = open_file(self.directory / OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        kind = "attempt" if self._recovery is None else "recovery"
        restarts, nodes = self.counts.restarts, self._nodes
        self._record(kind, attempt=self._number, restarts=restarts, nodes=nodes)
        self._write_state(State.running, self._because)
        self._before = ledger.last_attempt(self.directory)
        child = self._start(output)
        os.close(output)
        # Only now, so that the task does not wait; a later edit is not in the task's process.
        self._changed = code.changed_files(self.plan.code) if self._command is None else []
        status = self._wait(child, began)
        processes.kill_descendants()  # orphans of a supervisor that was killed
        self._end_strays()
        ending = self._explain_by_code(self.hangs.explain(self._ending(status)))
        said = {"reason": ending.reason.name, "state": ending.ended_as, "text": ending.text}
        self._record("end", attempt=self._number, code=ending.code, rank=ending.rank, **said)
        return ending

    def _explain_by_code(self, ending: Ending) -> Ending:
        """The end of an attempt, with the changed files if it failed with edited code."""
        if ending.reason is not Reason.failed or not self._changed:
            return ending
        names = [one.removeprefix(os.path.join(self.plan.cwd, "")) for one in self._changed]
        files = messages.truncate_list(names, _SHOWN_FILES)
        text = f"{ending.text}; the code changed since the job was submitted: {files}"
        return replace(ending, reason=Reason.code_changed, text=text)

    def _environment(self) -> dict[str, str]:
        """The environment of the task."""
        environment: dict[str, str] = os.environ | self.plan.environment
        for name in (SAVE_WITHIN, RANK, RANKS, RECOVERS, RETURN_CODE, *RankInfo().variables()):
            environment.pop(name, None)  # set by a job around this one
        if self.counts.unsaved_s:
            environment[SAVE_WITHIN] = f"{self.counts.unsaved_s / 2:.3f}"
        environment |= {
            TOKEN: self.plan.token,
            JOB_DIR: str(self.directory),
            ATTEMPT: str(self._number),
            "FORGE_RESTART_COUNT": str(self.counts.restarts),
        }
        if self._recovery is not None:
            environment |= {
                ATTEMPT: str(self._number - 1),
                RETURN_CODE: str(self._recovery["code"]),
                RECOVERS: str(self._recovery["rule"]),
            }
        return environment

    @property
    def _command(self) -> ExecPlan | None:
        """The plan of the command that is running; None for the user's main, which uses forge."""
        return self.plan.exec if self._recovery is None else ExecPlan()

    def _read_ending(self, report: dict[str, Any], rank: int = 0) -> Ending:
        """The end of a task, from its supervisor's report and its own verdict."""
        if self._command is not None:
            return Ending.of_command(report, self._command, self.plan.actions)
        code, said = report["code"], verdict.read(self.directory, rank)
        if code == ExitCode.FINISHED and not self._has_returned(said, rank):
            return Ending.of(1, text="ended with code 0 before main had returned (os._exit, fork?)")
        lost = ledger.lost_run(self.directory, self._before)
        if code == ExitCode.FINISHED and lost is not None:
            # Report it as the end of the task: main has ignored it.
            text = (
                "main returned, but a child process died inside its `with forge.Run(…)` block:"
                f" its training in {lost} is not finished"
            )
            return Ending.of(-signal.SIGKILL, text=text)
        if code == ExitCode.UNHEALTHY and (found := node_fault.read(self.directory, rank)):
            return Ending.of(code, found.reason, found.text)
        if said is not None and said.exit_code == code:
            return Ending.of(code, said.reason, said.text, is_held=report["is_held"])
        killed = report.get("oom_kills", 0)
        return Ending.of(code, is_held=report["is_held"], oom_kills=killed)

    def _of_all(self, ended: Sequence[tuple[float, Ending]]) -> Ending:
        """The end of the rank that failed first, from the times at which the ranks ended.

        A rank that exits because it lost another rank, or because another rank's node is sick, has
        not ended the job, whenever it exits.
        """
        said = node_fault.read_all(self.directory, len(ended))
        found = {rank for rank, one in said.items() if one.node}

        def place(rank: int) -> tuple[bool, float, int]:
            at, ending = ended[rank]
            is_healthy = bool(found) and rank not in found and ending.code == ExitCode.UNHEALTHY
            return is_healthy or ending.reason is Reason.rank_lost, at, ending.code

        bad = [rank for rank, one in enumerate(ended) if not one[1].is_finished]
        first = min(bad, key=place, default=0)
        if first:  # the output of rank 0 does not show the cause
            what = f"rank {first} of {len(ended)}: {ended[first][1].text}"
            self._print(f"{what}; its output is in {OUTPUT}{suffix(first)}")
        return replace(ended[first][1], rank=first)

    def _patience_s(self) -> float:
        """Seconds for the other ranks to exit, once a rank has failed."""
        return float((self.plan.timeout_s or ORPHANED_S) + 2 * MARGIN_S)

    def _has_returned(self, said: Verdict | None, rank: int) -> bool:
        """Whether the task's main returned, or its training finished."""
        has_trained = said is not None and said.exit_code == ExitCode.FINISHED
        return has_trained or (self.forge / f"{RESULT}{suffix(rank)}").exists()

    def _end(self, ending: Ending, decision: Decision) -> int:
        state = ending.state
        if state is not State.finished:
            self._print(f"{state.value}: {decision.because}")
        self._record(state.name, because=decision.because)
        ended = {"code": ending.code, "reason": ending.reason, "rank": ending.rank}
        self._write_state(state, decision.because, **ended)
        if self.plan.exec is not None:
            attempts.keep(self.directory)
        return ending.exit_code
