"""The parent of one task: it does what the task cannot do for itself.

A task that holds the GIL in a C call cannot enforce its own deadline, and a killed task cannot end
the processes that it started. The supervisor does not import torch and has no threads. It

  - passes on the signals it gets, and after a stopping signal counts the seconds: if the task has
    not exited by its deadline, the supervisor prints its stacks and kills it;
  - kills all processes that the task leaves, daemons too, since orphans become its children; jobs
    of a sweep inside this one have the rest of the deadline to save;
  - checks whether the task makes progress (`hang_watch`);
  - stops the task if its own parent has ended; if the supervisor itself is killed, the kernel kills
    the task, and the next parent that adopts orphans kills the rest.

Time in which the task is stopped (SIGSTOP, gang scheduling) or traced does not count.
Source: prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from forge.filesystem.files import read_trusted
from forge.job.deadline import Deadline
from forge.job.hang_watch import TICK_S, HangWatch
from forge.jobdir.job_files import TOKEN
from forge.jobdir.rank_report import RankReport
from forge.process import children, memory, processes, stacks

MARGIN_S = 5.0
"""Seconds after the task's own deadline: a task that ends itself reports more than we can."""
ORPHANED_S = 90.0
"""Deadline of a task whose policy has none, once its job's wrapper has ended."""
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Supervisor:
    """Runs one task, and returns when all of its processes have ended."""

    command: list[str]
    environment: dict[str, str]
    output: int
    """File descriptor that becomes the task's stdout and stderr."""
    actions: dict[str, str]
    """Signal -> stop | requeue | save | ignore; empty: every stopping signal stops."""
    timeout_s: float
    """The task's own deadline in seconds after a stopping signal; 0: none."""
    report: Path
    """The file for the report on the task's end."""
    parent: int
    """pid of the process that started the supervisor."""
    cwd: str = "."
    announcement: str = ""
    """Name of the signal before the time limit; it can come early."""
    early: Path | None = None
    """File with the names of signals that came before the supervisor could handle them."""
    is_held: bool = False
    """Whether the task had not exited by its deadline, and was killed."""
    hang_watch: HangWatch | None = None
    """Watches the task's progress; None without hang detection."""
    _is_blind: bool = False
    """Whether an error of the hang detection was printed."""
    _is_killed: bool = False
    """Whether the task was sent SIGKILL."""
    deadline: Deadline = field(init=False)
    """Begins with the first signal to stop."""
    _status: int | None = None
    """Wait status of the task, once it has ended."""

    margin_s: ClassVar[float] = MARGIN_S
    """Seconds added to the deadline."""

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.margin_s, self.environment, self.report.parent)

    def run(self) -> int:
        """Run the task from start to end; returns its exit code, 128 + N for signal N."""
        children.adopt_orphans()
        numbers = (*_FORWARDED, signal.SIGINT, signal.SIGCHLD)
        self._reader = children.listen(numbers)
        killed_before = memory.oom_kills()
        early = self._early()
        self._task = self._start()
        for number in early:  # they arrive now
            os.kill(os.getpid(), number)
            if number == signal.SIGINT:  # not passed on: the task gets it, too
                self._pass_on(number, [self._task])
        status = self._wait()
        ended = time.time()  # before its children: this time shows which rank ended first
        deadline, at_most_s = self.deadline, self.timeout_s or ORPHANED_S
        save_s = deadline.left_s if deadline.has_begun else at_most_s
        processes.end_descendants(self.environment.get(TOKEN), max(save_s, 0.0))
        code = os.waitstatus_to_exitcode(status)
        killed_after = memory.oom_kills()
        oom_kills = 0
        if killed_before is not None and killed_after is not None:
            oom_kills = max(killed_after - killed_before, 0)
        report = RankReport(
            code=code,
            is_held=self.is_held,
            time=ended,
            node=os.environ.get("SLURMD_NODENAME", ""),
            stops=self._stops_seen(),
            is_done=self._is_done(),
            oom_kills=oom_kills,
            memory_bytes=memory.limit_bytes() if oom_kills else None,
            section=self.hang_watch.section if self.hang_watch is not None else "",
        )
        try:
            report.write(self.report)
        except OSError:  # a full disk: our exit code has the main point
            code = self._unreported(code)
        return code if code >= 0 else 128 - code

    def _stops_seen(self) -> list[str]:
        """For a command: the signals that asked it to stop."""
        return []

    def _is_done(self) -> bool:
        """For a command: whether the file exists that it writes when it is done."""
        return False

    def _unreported(self, code: int) -> int:
        """The exit code to return if the report cannot be written."""
        return code

    def _early(self) -> list[int]:
        """Signals that the shell above us wrote down before we could handle them."""
        try:
            names = read_trusted(self.early).decode().split() if self.early is not None else []
        except OSError:
            return []  # no signal came
        return [signal.Signals[f"SIG{name}"] for name in dict.fromkeys(names)]

    def _start(self) -> int:
        supervisor = os.getpid()
        pid = children.fork()
        if pid:
            return pid
        try:
            children.die_with_parent()
            if os.getppid() != supervisor:
                os._exit(1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            self._set_signals()
            null = os.open(os.devnull, os.O_RDONLY)
            for number, source in enumerate((null, self.output, self.output)):
                os.dup2(source, number)
            os.chdir(self.cwd)
            os.execvpe(self.command[0], self.command, self.environment)
        except BaseException as error:  # noqa: BLE001 - the process ends here in any case
            os.write(2, f"forge: {self.command[0]} cannot be started: {error}\n".encode())
        finally:
            os._exit(127)

    def _set_signals(self) -> None:
        """In the task's process, before exec: block the signals that the task will handle."""
        # They stay pending until the task has set its handlers: a blocked mask survives exec.
        names = {f"SIG{name}" for name, action in self.actions.items() if action != "ignore"}
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.Signals[name] for name in names})

    def _has_ended(self) -> bool:
        """Whether the task has ended; collects every child that has ended."""
        with contextlib.suppress(ChildProcessError):  # no child is left
            self._status = children.reap().get(self._task, self._status)
        return self._status is not None

    def _wait(self) -> int:
        """Wait until the task has ended; pass on signals and enforce the deadline."""
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
            if self.deadline.has_begun:
                self._keep_deadline(time.monotonic() - before)
            if self.hang_watch is not None:
                self._look_for_hang(self.hang_watch, time.monotonic() - before)
        assert self._status is not None
        return self._status

    def _look_for_hang(self, watch: HangWatch, passed_s: float) -> None:
        """Take part in hang detection; kill the task if the wrapper decides that the job hangs."""
        try:
            if watch.tick(passed_s, is_stopping=self.deadline.has_begun):
                self._kill("the job hangs")
        except Exception as error:  # noqa: BLE001 - an error here never ends the task
            if not self._is_blind:
                self._is_blind = True
                text = (
                    "forge: hang detection failed; training continues, and forge tries again:"
                    f" {type(error).__name__}: {error}\n"
                )
                with contextlib.suppress(OSError):  # a full disk, perhaps the same one
                    os.write(self.output, text.encode())

    def _stop_orphan(self) -> None:
        """Stop the task if our parent has ended: no other process would stop it."""
        self._pass_on(signal.SIGTERM, processes.descendants())
        self.deadline.begin(self.timeout_s or ORPHANED_S)

    def _drain_signals(self) -> None:
        for number in set(children.drain(self._reader)) - {signal.SIGCHLD}:
            if number in _FORWARDED:
                # Slurm signals every process, so the task can get the signal twice. Only a second
                # Ctrl+C has a meaning of its own: exit immediately.
                self._pass_on(number, [self._task])
            name = signal.Signals(number).name.removeprefix("SIG")
            if self._action(number) in ("stop", "requeue"):
                self.deadline.begin(self.timeout_s, is_announced=name == self.announcement)

    def _action(self, number: int) -> str:
        """The policy's action for a signal."""
        name = signal.Signals(number).name.removeprefix("SIG")
        return self.actions.get(name, "ignore" if self.actions else "stop")

    def _pass_on(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            processes.send(pid, number)

    def _keep_deadline(self, passed_s: float) -> None:
        """Count the seconds, except those in which the task or we could not run."""
        counts_s = 0.0 if processes.is_suspended(self._task) else min(passed_s, 2 * TICK_S)
        if self.deadline.pass_by(counts_s):
            self.is_held = True
            after_s = self.timeout_s + self.margin_s
            self._kill(f"the task has not exited {after_s:g} s after a signal")

    def _kill(self, why: str) -> None:
        if not self._is_killed:  # else it has not ended yet, or has left processes
            self._is_killed = True
            text = f"forge: {why} and is killed. The stacks of all its threads:\n"
            with contextlib.suppress(OSError):  # a full disk does not prevent the kill
                os.write(self.output, text.encode())
            stacks.show_all([self._task], self._reader)
        processes.kill_descendants()
