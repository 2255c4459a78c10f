"""One job, from its first start to its last: `python -m forge.job <directory>`.

It runs the job's task under a watch, again and again in the same directory, until the job is
finished, somebody stops it, or a budget is used up. Standard library only: it starts in
milliseconds, outlives whatever happens to the task, and works outside a container.

    starts the task ─► signals it before the time limit, kills at it ─► reads how it ended
         ▲                                                                   │
         └────────── within budget, for this reason? (requeue.decide) ◄──────┘

The lock in the job's directory is held while anything of the job may be alive: by this process,
and by the watch, which inherits it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge import processes
from forge.errors import ExitCode
from forge.job_files import (
    LOCK,
    OUTPUT,
    PLAN,
    RESULT,
    STATE,
    VERDICT,
    WATCH,
    forge_dir,
    read_json,
    take_lock,
    write_json,
)
from forge.requeue import Counts, Decision, Outcome, Reason, decide
from forge.watch import MARGIN_S, ORPHANED_S, Watch

TOKEN = "FORGE_JOB_TOKEN"
"""Environment variable that marks every process of a job."""
_CLAIM_S = 30.0
"""Seconds beyond the task's deadline that an earlier wrapper's processes have to leave."""
_STEP_DIR = re.compile(r"step_(\d+)")


class Job:
    """The wrapper's whole state."""

    def __init__(self, directory: Path, is_continued: bool, parent: int | None = None) -> None:
        self.directory = directory
        self.forge = forge_dir(directory)
        plan = read_json(self.forge / PLAN)
        if plan is None:
            sys.exit(f"forge: {self.forge / PLAN} cannot be read: start the sweep again")
        self.plan = plan
        self.counts = Counts()
        self._is_continued = is_continued
        self._because = ""
        self._asked: Reason | None = None
        self._interrupted = -math.inf
        # Given by whoever starts us: who was killed before we look is not our parent any more.
        self._parent = os.getppid() if parent is None else parent

    def run(self) -> int:
        """Every attempt; returns the exit code of the last, 128 + N for signal N."""
        processes.adopt_orphans()
        names = ("TERM", "HUP", "INT", "QUIT", "USR1", "USR2", "CHLD")
        self._reader = processes.listen(signal.Signals[f"SIG{name}"] for name in names)
        self._claim()
        outcome = self._take_over()
        while True:
            self._look_for_parent()
            is_finished = outcome is not None and outcome.code == ExitCode.FINISHED
            if self._asked is not None and not is_finished:  # before anything was started
                outcome = Outcome(128 + signal.SIGTERM, self._asked)
            outcome = outcome or self._attempt()
            decision = decide(outcome, self.counts, self.plan["requeue"], self._saved_step())
            if not decision.starts_again or self._asked is not None:
                return self._end(outcome, decision)
            self._tell("requeue", because=decision.because, restarts=self.counts.restarts)
            self._because = decision.because
            self._write_state("starting", self._because)
            outcome = None

    # -- the directory -------------------------------------------------------------------------

    def _claim(self) -> None:
        """Take the lock; the processes of a wrapper that was killed have a while to leave."""
        self._lock = os.open(self.forge / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        leaving_s = (self.plan["timeout_s"] or ORPHANED_S) + MARGIN_S
        deadline = time.monotonic() + leaving_s + _CLAIM_S
        while not take_lock(self._lock):
            if time.monotonic() > deadline:
                sys.exit(int(ExitCode.IN_USE))
            # Nothing tells when a lock is free and listens to signals as well.
            select.select([self._reader], [], [], 0.05)
            self._take_in()
            if os.getppid() != self._parent:
                sys.exit(int(ExitCode.TERMINATED))  # nothing is ours yet

    def _take_over(self) -> Outcome | None:
        """End what an earlier wrapper left behind, and go on with its budgets.

        Returns:
            How the attempt ended in which that wrapper was killed; None for a first start.
        """
        self._end_strays()
        state = read_json(self.forge / STATE)  # the launcher has removed that of earlier sweeps
        report = read_json(self.forge / WATCH) or {}
        if state is not None and (state["state"] == "finished" or self._is_continued):
            self.counts = Counts(**state["counts"])
            has_ended = report.get("code") == ExitCode.FINISHED and self._has_returned()
            is_finished = state["state"] == "finished" or has_ended
            return Outcome(ExitCode.FINISHED if is_finished else -signal.SIGKILL)
        self.counts.best_step = self._saved_step()
        return None

    def _end_strays(self) -> None:
        """Processes that carry this job's mark and are no descendants any more."""
        for _ in range(20):  # one that was just born is missed by a single look
            pids = processes.marked(TOKEN, self.plan["token"])
            if not pids:
                break
            for pid in pids:
                processes.send(pid, signal.SIGKILL)
            processes.wait_gone(pids, 1.0)

    def _saved_step(self) -> int:
        """Steps done in the newest checkpoint; -1 without one."""
        try:
            names = os.listdir(self.directory / self.plan["checkpoint_dir"])
        except OSError:
            return -1
        matches = (_STEP_DIR.fullmatch(name) for name in names)
        return max((int(match[1]) for match in matches if match), default=-1)

    def _write_state(self, state: str, because: str = "", **more: Any) -> None:
        content = {
            "state": state,
            "because": because,
            "pid": os.getpid(),
            "time": time.time(),
            "counts": asdict(self.counts),
            **more,
        }
        try:
            write_json(self.forge / STATE, content)
        except OSError as error:  # a full disk ends no job
            self._print(f"state.json cannot be written: {error}")

    def _tell(self, kind: str, **values: Any) -> None:
        """Account for it in the job's own ledger."""
        line = json.dumps({"t": round(time.time(), 3), "kind": kind, **values}) + "\n"
        try:
            folder = self.forge / "ledger"
            folder.mkdir(exist_ok=True)
            fd = os.open(folder / "job.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
        except OSError as error:
            self._print(f"the job's ledger cannot be written: {error}")

    def _print(self, text: str) -> None:
        """Into the job's output, beside what the task says."""
        with contextlib.suppress(OSError):  # a full disk ends no job
            os.write(2, f"forge: {text}\n".encode())

    # -- an attempt ----------------------------------------------------------------------------

    def _attempt(self) -> Outcome:
        for name in (WATCH, VERDICT, RESULT):
            (self.forge / name).unlink(missing_ok=True)
        output = os.open(
            self.directory / OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
        self._tell("attempt", restarts=self.counts.restarts)
        self._write_state("running", self._because)
        began = time.monotonic()
        watch = self._fork_watch(output)
        os.close(output)
        status = self._wait(watch, began)
        processes.kill_descendants()  # orphans of a watch that was killed
        self._end_strays()
        outcome = self._outcome(status)
        self._tell("end", code=outcome.code, reason=outcome.reason.name, text=str(outcome))
        return outcome

    def _outcome(self, status: int) -> Outcome:
        """How the attempt ended; `status` is the watch's, for where it could not report."""
        report = read_json(self.forge / WATCH)
        if report is None:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return Outcome(-9, self._asked_for(-9), is_watch_lost=True)
            report = {"code": code if code < 128 else 128 - code, "is_held": False}
        code, verdict = report["code"], read_json(self.forge / VERDICT) or {}
        said = verdict.get("reason", "") if verdict.get("exit_code") == code else ""
        if code == ExitCode.FINISHED and not self._has_returned():
            code, said = 1, "ended with code 0 before main had returned (os._exit, fork?)"
        return Outcome(code, self._asked_for(code), report["is_held"], verdict=said)

    def _has_returned(self) -> bool:
        """Whether the task's main came to its end, or its training did."""
        verdict = read_json(self.forge / VERDICT) or {}
        return (self.forge / RESULT).exists() or verdict.get("exit_code") == ExitCode.FINISHED

    def _fork_watch(self, output: int) -> int:
        parent = os.getpid()
        environment = os.environ | self.plan["environment"]
        environment |= {
            TOKEN: self.plan["token"],
            "FORGE_RESTART_COUNT": str(self.counts.restarts),
        }
        pid = processes.fork()
        if pid:
            return pid
        code = 1
        try:
            code = Watch(
                self.plan["command"],
                environment,
                output,
                self.plan["actions"],
                self.plan["timeout_s"],
                self.forge / WATCH,
                parent,
                self.plan["cwd"],
            ).run()
        except BaseException as error:  # noqa: BLE001 - the process ends here, come what may
            self._print(f"the watch failed: {error!r}")
        finally:
            os._exit(code)

    def _wait(self, watch: int, began: float) -> int:
        """Until the watch has ended; the time limit and signals meanwhile. Returns its status."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        parent = processes.open_pidfd(self._parent)
        if parent is not None:
            poll.register(parent, select.POLLIN)
        limit_s = self.plan["time_limit_s"]
        self._is_limit_near = False
        while (status := processes.reap(watch)) is None:
            left_s = None if limit_s is None else limit_s - (time.monotonic() - began)
            if left_s is not None and left_s <= self.plan["lead_s"] and not self._is_limit_near:
                self._is_limit_near = True
                if self.plan["lead_s"] > 0:  # else nobody there knows what it means
                    self._tell("limit near", left_s=round(left_s, 1), signal=self.plan["signal"])
                    self._send_all(signal.Signals[f"SIG{self.plan['signal']}"])
            if left_s is not None and left_s <= 0:
                self._tell("limit")
                processes.kill_descendants()
                left_s = None
                limit_s = None
            elif left_s is not None and not self._is_limit_near:
                left_s -= self.plan["lead_s"]
            if parent is None:
                left_s = min(left_s or 1.0, 1.0)
            poll.poll(None if left_s is None else max(left_s, 0) * 1000 + 1)
            self._take_in()
            self._look_for_parent()
            if parent is not None and os.getppid() != self._parent:
                poll.unregister(parent)  # it would wake us again and again
                os.close(parent)
                parent = None
        if parent is not None:
            os.close(parent)
        return status

    def _asked_for(self, code: int) -> Reason | None:
        if self._asked is not None:
            return self._asked
        # Only an end that the limit explains: a bug of the user's in these seconds is one still.
        signalled = 128 + signal.Signals[f"SIG{self.plan['signal']}"]
        is_limit = code < 0 or code in (ExitCode.REQUEUE, ExitCode.FORCED, signalled)
        return Reason.time_limit if self._is_limit_near and is_limit else None

    # -- signals -------------------------------------------------------------------------------

    def _take_in(self) -> None:
        for number in processes.heard(self._reader):
            if number == signal.SIGQUIT:
                self._ask(Reason.interrupted, signal.SIGINT)
                processes.kill_descendants()
            elif number == signal.SIGINT:
                # Inside another job's sweep it comes from that job's wrapper and from our launcher.
                is_second = time.monotonic() - self._interrupted > 1.0
                if self._asked is Reason.interrupted and is_second:
                    processes.kill_descendants()
                self._interrupted = time.monotonic()
                self._ask(Reason.interrupted, signal.SIGINT)
            elif number in (signal.SIGTERM, signal.SIGHUP):
                self._ask(Reason.cancelled, signal.SIGTERM)
            elif number in (signal.SIGUSR1, signal.SIGUSR2):
                self._send_all(number)

    def _look_for_parent(self) -> None:
        """Stop where whoever started us is gone."""
        if os.getppid() != self._parent:
            self._ask(Reason.orphaned, signal.SIGTERM)

    def _ask(self, reason: Reason, number: int) -> None:
        """Stop the task for good; it saves first."""
        if self._asked is None:
            self._asked = reason
            self._write_state("stopping", reason.value)
            self._send_all(number)

    def _send_all(self, number: int) -> None:
        """Signal every process of the job, as Slurm does."""
        for pid in processes.descendants():
            # A sweep inside a job passes it on by itself: twice would mean at once.
            is_ours = processes.variable(pid, TOKEN) in (None, self.plan["token"])
            if is_ours and not processes.is_resource_tracker(pid):
                processes.send(pid, number)

    # -- the end -------------------------------------------------------------------------------

    def _end(self, outcome: Outcome, decision: Decision) -> int:
        if outcome.code == ExitCode.FINISHED:
            state = "finished"
        else:
            stops = (Reason.interrupted, Reason.cancelled, Reason.orphaned)
            state = "stopped" if outcome.reason in stops else "failed"
        self._tell(state, because=decision.because)
        self._write_state(state, decision.because, code=outcome.code, reason=outcome.reason.name)
        return outcome.code if outcome.code >= 0 else 128 - outcome.code


def main(arguments: list[str]) -> int:
    """`python -m forge.job [--parent PID] [--continue] <job directory>`."""
    parent = int(arguments[1]) if arguments[:1] == ["--parent"] else None
    arguments = arguments[0 if parent is None else 2 :]
    is_continued = arguments[:1] == ["--continue"]
    (directory,) = arguments[is_continued:]
    return Job(Path(directory), is_continued, parent).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
