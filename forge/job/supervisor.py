"""The parent of one task: what the task cannot do for itself is done here.

A task that holds the interpreter's lock in a C call cannot run its own deadline, and one that was
killed cannot end what it started. The supervisor has no torch and no threads. It

  - passes on the signals it gets, and from a stopping one counts the seconds: a task that is
    still there after its own deadline shows its stacks, and is killed;
  - ends whatever the task leaves behind, daemons too, since orphans become its children; jobs of
    a sweep inside this one have what is left of the deadline to save;
  - looks whether the task makes progress, by `hang_watch`;
  - stops the task when its own parent is gone; when it is itself killed, the kernel kills the
    task, and the next parent that adopts orphans ends the rest.

Time in which the task is stopped (SIGSTOP, gang scheduling) or traced does not count.
Source: prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forge.filesystem.files import read_trusted
from forge.job.hang_watch import TICK_S, HangWatch
from forge.jobdir.job_files import TOKEN, write_json
from forge.process import memory, processes, stacks, time_limit

MARGIN_S = 5.0
"""Seconds after the task's own deadline: it ends itself with more to say than we have."""
ORPHANED_S = 90.0
"""Deadline of a task whose policy has none, once its job's wrapper is gone."""
_FORWARDED = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)  # Windows imports this module, too
]


@dataclass
class Supervisor:
    """Runs one task, and returns when nothing of it is left."""

    command: list[str]
    environment: dict[str, str]
    output: int
    """File descriptor that becomes the task's stdout and stderr."""
    actions: dict[str, str]
    """Signal -> stop | requeue | save | ignore; empty: every stopping signal stops."""
    timeout_s: float
    """The task's own deadline after a stopping signal; 0: it has none."""
    report: Path
    """Where to tell how it ended."""
    parent: int
    """pid of the process that started the supervisor."""
    cwd: str = "."
    announcement: str = ""
    """Name of the signal that announces the time limit; it may come early."""
    early: Path | None = None
    """File with the names of signals that came before the supervisor could hear them."""
    is_held: bool = False
    """Whether the task had not exited by its deadline, and was killed."""
    hang_watch: HangWatch | None = None
    """None: nobody looks whether the task makes progress."""
    _is_blind: bool = False
    """Whether it was said that this cannot be looked at."""
    _deadline: float | None = None
    _is_announced: bool = False
    """Whether it is the time limit's announcement that began the deadline."""
    _status: int | None = None
    """Wait status of the task, once it has ended."""

    margin_s: ClassVar[float] = MARGIN_S
    """Added to the deadline."""

    def run(self) -> int:
        """The whole life of the task; returns its exit code, 128 + N for signal N."""
        processes.adopt_orphans()
        numbers = (*_FORWARDED, signal.SIGINT, signal.SIGCHLD)
        self._reader = processes.listen(numbers)
        killed_before = memory.oom_kills()
        early = self._early()
        self._task = self._start()
        for number in early:  # they arrive now
            os.kill(os.getpid(), number)
            if number == signal.SIGINT:  # which is not passed on: it comes to the task by itself
                self._pass_on(number, [self._task])
        status = self._wait()
        ended = time.time()  # before its children have: by this the first rank to end is known
        save_s = self.timeout_s or ORPHANED_S if self._deadline is None else self._deadline
        processes.end_descendants(self.environment.get(TOKEN), max(save_s, 0.0))
        code = os.waitstatus_to_exitcode(status)
        report = {
            "code": code,
            "is_held": self.is_held,
            "time": ended,
            "node": os.environ.get("SLURMD_NODENAME", ""),
            **self._more(),
        }
        killed = memory.oom_kills()
        if killed_before is not None and killed is not None and killed > killed_before:
            report["oom_kills"] = killed - killed_before
        try:
            write_json(self.report, report)
        except OSError:  # a full disk: our exit code says most of it
            code = self._unreported(code)
        return code if code >= 0 else 128 - code

    def _more(self) -> dict[str, Any]:
        """What else is to be told of the end."""
        return {}

    def _unreported(self, code: int) -> int:
        """The task's exit code, where that is all that can be told of its end."""
        return code

    def _early(self) -> list[int]:
        """Signals that somebody wrote down before we could hear them."""
        try:
            names = read_trusted(self.early).decode().split() if self.early is not None else []
        except OSError:
            return []  # none came
        return [signal.Signals[f"SIG{name}"] for name in dict.fromkeys(names)]

    def _start(self) -> int:
        supervisor = os.getpid()
        pid = processes.fork()
        if pid:
            return pid
        try:
            processes.die_with_parent()
            if os.getppid() != supervisor:
                os._exit(1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            self._set_signals()
            null = os.open(os.devnull, os.O_RDONLY)
            for number, source in enumerate((null, self.output, self.output)):
                os.dup2(source, number)
            os.chdir(self.cwd)
            os.execvpe(self.command[0], self.command, self.environment)
        except BaseException as error:  # noqa: BLE001 - the process ends here, come what may
            os.write(2, f"forge: {self.command[0]} cannot be started: {error}\n".encode())
        finally:
            os._exit(127)

    def _set_signals(self) -> None:
        """In the task's process, before it is the task: what it begins with."""
        # Kept, not fatal, until the task's handlers stand: a blocked mask survives exec.
        names = {f"SIG{name}" for name, action in self.actions.items() if action != "ignore"}
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.Signals[name] for name in names})

    def _has_ended(self) -> bool:
        """Whether the task has; collects every child that has."""
        with contextlib.suppress(ChildProcessError):  # there is none left
            self._status = processes.reap().get(self._task, self._status)
        return self._status is not None

    def _wait(self) -> int:
        """Until the task has ended: pass on signals, hold to the deadline."""
        parent = processes.open_pidfd(self.parent)
        events = [self._reader] if parent is None else [self._reader, parent]
        is_orphaned = False
        while not self._has_ended():
            before = time.monotonic()
            tick_s = TICK_S if self.hang_watch is None else self.hang_watch.tick_s
            select.select(events, [], [], tick_s)
            self._drain_signals()
            if not is_orphaned and os.getppid() != self.parent:
                is_orphaned = True
                events = [self._reader]
                self._stop_orphan()
            if self._deadline is not None:
                self._keep_deadline(time.monotonic() - before)
            if self.hang_watch is not None:
                self._look_for_hang(self.hang_watch, time.monotonic() - before)
        assert self._status is not None
        return self._status

    def _look_for_hang(self, watch: HangWatch, passed_s: float) -> None:
        """Ask and answer whether the job hangs; kill the task where its wrapper says so."""
        try:
            if watch.tick(passed_s, is_stopping=self._deadline is not None):
                self._kill("the job hangs")
        except Exception as error:  # noqa: BLE001 - what watches a task never ends it
            if not self._is_blind:
                self._is_blind = True
                text = f"forge: hang detection failed: {type(error).__name__}: {error}\n"
                with contextlib.suppress(OSError):  # a full disk, perhaps the same one
                    os.write(self.output, text.encode())

    def _stop_orphan(self) -> None:
        """Our parent is gone: nobody else would end the task."""
        self._pass_on(signal.SIGTERM, processes.descendants())
        self._begin_deadline(self.timeout_s or ORPHANED_S)

    def _drain_signals(self) -> None:
        for number in set(processes.drain(self._reader)) - {signal.SIGCHLD}:
            if number in _FORWARDED:
                # Slurm signals every process by itself, so the task may get it twice, which
                # changes nothing; but for Ctrl+C, where twice means at once.
                self._pass_on(number, [self._task])
            name = signal.Signals(number).name.removeprefix("SIG")
            if self._action(number) in ("stop", "requeue"):
                self._begin_deadline(self.timeout_s, is_announced=name == self.announcement)

    def _action(self, number: int) -> str:
        """What a signal leads to."""
        name = signal.Signals(number).name.removeprefix("SIG")
        return self.actions.get(name, "ignore" if self.actions else "stop")

    def _pass_on(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            processes.send(pid, number)

    def _begin_deadline(self, timeout_s: float, *, is_announced: bool = False) -> None:
        if timeout_s <= 0:
            return
        if is_announced:  # a task may train on until the end that was announced to it
            timeout_s = max(timeout_s, self._until_end_s())
        if self._deadline is None or not is_announced:
            left_s = math.inf if self._deadline is None else self._deadline
            self._deadline = min(left_s, timeout_s + self.margin_s)
            self._is_announced = is_announced

    def _until_end_s(self) -> float:
        """Seconds until the time limit ends the task, as announced to it; 0.0 without one."""
        end, now = time_limit.end_time_from_env(self.environment) or 0.0, time.time()
        if time_limit.END_TIME not in self.environment:
            return 0.0
        left_s = time_limit.moved_left_s(self.report.parent / time_limit.MOVED, end - now, now)
        return max(left_s, 0.0)

    def _keep_deadline(self, passed_s: float) -> None:
        """Count the seconds, but those in which the task, or we, could not run."""
        assert self._deadline is not None
        if not processes.is_suspended(self._task):
            self._deadline -= min(passed_s, 2 * TICK_S)
        if self._deadline > 0:
            return
        if self._is_announced and self._until_end_s() > 0:  # the limit was extended meanwhile
            self._deadline = self._until_end_s() + self.margin_s
            return
        self.is_held = True
        self._kill(f"the task has not exited {self.timeout_s + self.margin_s:g} s after a signal")

    def _kill(self, why: str) -> None:
        with contextlib.suppress(OSError):  # a full disk does not keep it from its end
            os.write(
                self.output,
                f"forge: {why} and is killed. The stacks of all its threads:\n".encode(),
            )
        stacks.show_all([self._task], self._reader)
        processes.kill_descendants()
