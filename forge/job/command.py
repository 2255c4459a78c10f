"""The supervisor of a command of `forge exec`: a program that does not use forge.

The command gets each signal once (its children can be saving when the second signal comes), alone
or with its process group, and then has time to exit. If it exits before its group, such as a shell
without a trap, the group keeps the rest of that time. Processes that have left the group are killed
when the command ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from forge.job.supervisor import ORPHANED_S, Supervisor
from forge.jobdir.plan import ExecPlan
from forge.process import children, processes

_BEGINNING_S = 1.0
"""Slurm signals every process, but can miss a process that is just starting."""
_LATE_S = 1.0
"""Slurm signals one process after another: the command can die of a signal before we get it."""


@dataclass
class CommandSupervisor(Supervisor):
    """Runs one command, and returns when all of its processes have ended."""

    plan: ExecPlan = field(default_factory=ExecPlan)
    directory: Path = field(default_factory=Path)
    """The job's directory."""
    is_signalled_by_others: bool = False
    """Whether the sender of our signals also signals the command."""
    _stops: list[str] = field(default_factory=list)
    """Signals that asked the command to stop, each once."""
    _began: float = 0.0
    _ended: float | None = None
    """When the command itself ended, by the monotonic clock."""

    margin_s: ClassVar[float] = 0.0

    def _start(self) -> int:
        self._began = time.monotonic()
        task = super()._start()
        with contextlib.suppress(OSError):  # it has done so itself already
            os.setpgid(task, task)
        return task

    def _set_signals(self) -> None:
        """Restore the defaults: no signal is blocked, and our handlers are removed."""
        os.setpgid(0, 0)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) or number == signal.SIGXFSZ:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _drain_signals(self) -> None:
        for number in set(children.drain(self._reader)) - {signal.SIGCHLD}:
            name, action = signal.Signals(number).name.removeprefix("SIG"), self._action(number)
            is_new = name not in self._stops
            if action in ("stop", "requeue"):
                self._stop(name)
            is_others = self.is_signalled_by_others
            is_others &= time.monotonic() - self._began > _BEGINNING_S
            if is_new and action != "ignore" and not is_others:
                self._pass_on(number, [])

    def _stop(self, name: str, timeout_s: float | None = None) -> None:
        """Stop the command: after a timeout, or immediately, it is killed."""
        if name in self._stops:
            return
        self._stops.append(name)
        if self.plan.supports_termination:
            self.deadline.begin(self.timeout_s if timeout_s is None else timeout_s)
        else:
            processes.kill_descendants()

    def _stop_orphan(self) -> None:
        name = self.announcement or "TERM"
        if name not in self._stops:
            self._pass_on(signal.Signals[f"SIG{name}"], [])
        self._stop(name, self.timeout_s or ORPHANED_S)

    def _pass_on(self, number: int, pids: list[int]) -> None:
        # It has ended; or it belongs to another user (sudo) and cannot be signalled.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.plan.is_group_signalled:
                os.killpg(self._task, number)
            elif self._status is None:
                processes.send(self._task, number)

    def _has_ended(self) -> bool:
        if not super()._has_ended():
            return False
        now, is_others = time.monotonic(), self.is_signalled_by_others
        self._ended = now if self._ended is None else self._ended
        is_told = bool(self._stops) or (is_others and now - self._ended < _LATE_S)
        if not is_told or not (self.plan.is_group_signalled or is_others):
            return True
        try:
            os.killpg(self._task, 0)  # succeeds if a process is left in the group
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def _stops_seen(self) -> list[str]:
        self._drain_signals()  # the command can have reacted to a stop before us
        return self._stops

    def _is_done(self) -> bool:
        name = self.plan.done_file
        return name is not None and (self.directory / name).exists()

    def _unreported(self, code: int) -> int:
        """The exit code without a report, in which 0 would mean that the command has finished."""
        is_end = not self._stops or self.plan.is_zero_finished
        is_end = self._is_done() if self.plan.done_file else is_end
        return code if code or is_end else -signal.SIGTERM
