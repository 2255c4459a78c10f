"""Cooperative shutdown: a signal immediately sets a flag and a deadline, and nothing else.

Python runs signal handlers only in the main thread, between two bytecodes, so not while the main
thread is inside a C call. But the C part of each handler immediately writes the signal's number
into a pipe. A thread reads the pipe: it sets the flag and starts the deadline. When the deadline
passes, it writes the stacks of all threads into a file and ends the process.
One module, since handlers and thread share state that any signal can change.
Source: signal.set_wakeup_fd.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from forge import messages
from forge.config.schema import SignalConfig
from forge.errors import ExitCode
from forge.filesystem.files import make_directory, open_file
from forge.process import processes
from forge.shutdown.forked_children import ForkedChildren

__all__ = ["ShutdownHandler"]

_HANGUP_S = 2.0
"""Seconds in which SIGHUP can follow the first failed print to a closed terminal."""

_NOTICE_S = 1.0
"""Seconds from Ctrl+C to a notice: people press it again if nothing happens."""

_LOOK_S = 1.0
"""Seconds after which the thread checks the deadline, even if nothing has woken it."""

_LAST_WORDS_S = 2.0
"""Seconds that a forced exit waits until its message is written."""

_LEFT_IGNORED = (signal.SIGHUP, signal.SIGINT)
"""Signals that stay ignored if they were at the start (nohup, a background job of a script)."""


class ShutdownHandler:
    """Turns signals into a flag that a training loop reads after each step.

    Args:
        timeout_sec: Seconds from the first stopping signal until the process is ended with
            code 70 by `os._exit`, its children with it; 0 never forces.
        actions: Signal (`TERM`, `SIGUSR1`, …) -> stop | requeue | save | ignore; by default those
            of the policy.
        stacks_dir: Where the forced exit writes the stacks; the working directory by default.
        before_force: Called before a forced exit; has to limit its own time.
    """

    def __init__(
        self,
        timeout_sec: float = 600.0,
        actions: Mapping[str, str] | None = None,
        stacks_dir: Path | str | None = None,
        before_force: Callable[[], object] | None = None,
    ) -> None:
        self._decisive: signal.Signals | None = None
        self._is_save_requested = False
        self._interrupt: Callable[[], None] | None = None
        self._trips: dict[int, FrameType | None] = {}
        """Signals for the main thread since its last check; 0: the thread has asked for a check."""
        self._pass_over: Callable[[signal.Signals], bool] | None = None
        self._held_up_by: Callable[[], str] | None = None
        self._before_force = before_force
        self.deadline: float | None = None
        """`time.monotonic()` of the forced exit, or None."""
        self.asked_at: float | None = None
        """`time.monotonic()` of the first stopping signal, or None."""
        self._interrupts = 0
        self._is_notice_due = False
        self._originals: dict[signal.Signals, Any] = {}
        self._lock = threading.RLock()  # re-entrant: handlers interrupt the main thread anywhere
        self._pid = 0
        self._children = ForkedChildren()
        self.configure(timeout_sec, actions, stacks_dir)

    def configure(
        self,
        timeout_sec: float,
        actions: Mapping[str, str] | None = None,
        stacks_dir: Path | str | None = None,
    ) -> None:
        """Change the settings of the constructor, even while registered.

        Args:
            timeout_sec: As in the constructor.
            actions: As in the constructor.
            stacks_dir: As in the constructor.
        """
        self.timeout_sec = timeout_sec
        if not actions:
            actions = {name: one.value for name, one in SignalConfig().actions.items()}
        self.actions = {
            signal.Signals["SIG" + name.upper().removeprefix("SIG")]: action
            for name, action in actions.items()
        }
        self.stacks_dir = Path(stacks_dir) if stacks_dir is not None else Path.cwd()
        if self._originals:
            self._install()

    @property
    def is_of_parent(self) -> bool:
        """Whether the parent process registered the handlers, and this process is its fork."""
        return bool(self._originals) and self._pid != os.getpid()

    # -- registering ---------------------------------------------------------------------------

    def register(self) -> None:
        """Install the handlers; a second call changes nothing.

        Raises:
            RuntimeError: Outside the main thread, where Python cannot set handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "ShutdownHandler.register() was called in thread"
                f" {threading.current_thread().name!r}: Python sets signal handlers in the main"
                " thread only. Register there, before starting threads."
            )
        if self._originals:
            return
        self._pid = os.getpid()
        self._trips.clear()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003 - positional there
        self._writer.setblocking(False)  # noqa: FBT003 - positional there
        self._outer_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._install()
        self._children.watch(self._originals, self._trips, self._reader)
        self._thread = threading.Thread(target=self._watch, name="forge-signals", daemon=True)
        self._thread.start()

    def _install(self) -> None:
        """Set the Python half of the handlers.

        If no stop has to interrupt the main thread, the handler is a method written in C: a Python
        function can be interrupted by the next signal, so many signals would end in a
        RecursionError.
        """
        for number, action in self.actions.items():
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if is_ignored and action == "stop" and number in _LEFT_IGNORED:
                continue
            previous = signal.signal(number, self._python_half())
            self._originals.setdefault(number, previous)

    def _python_half(self) -> Callable[..., Any]:
        return self._trips.__setitem__ if self._interrupt is None else self._on_signal

    def take_back(self) -> list[str]:
        """Install the handlers again if other code has replaced them. Main thread only.

        Returns:
            The names of the signals whose handlers were replaced.
        """
        own = self._python_half()
        replaced = [one.name for one in self._originals if signal.getsignal(one) != own]
        if replaced:
            self._install()
        return replaced

    def interrupt_with(
        self,
        callback: Callable[[], None] | None,
        *,
        pass_over: Callable[[signal.Signals], bool] | None = None,
        held_up_by: Callable[[], str] | None = None,
    ) -> None:
        """Call a function in the main thread after a stopping signal. Main thread only.

        `Attempt._make_ready` calls this for a Run, and `stopping.hold_interrupts` outside of one.

        Args:
            callback: The function, which can raise; None (the default): a signal only sets the
                flag.
            pass_over: Whether a stopping signal that arrives now changes nothing; called from any
                thread.
            held_up_by: Describes for the forced exit's message what it interrupts; called from any
                thread.
        """
        self._interrupt, self._pass_over, self._held_up_by = callback, pass_over, held_up_by
        if self._originals:
            self._install()

    def unregister(self) -> None:
        """Restore the previous handlers, and cancel the forced exit."""
        if not self._originals:
            return
        for number, original in self._originals.items():
            # None: the handler was not set from Python, so Python cannot restore it either.
            signal.signal(number, signal.SIG_DFL if original is None else original)
        self._originals = {}
        self._give_wakeup_fd_back()
        self._children.let_go()
        self.deadline = None
        self._wake()
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _give_wakeup_fd_back(self) -> None:
        current = signal.set_wakeup_fd(-1)
        theirs = self._outer_fd if current == self._writer.fileno() else current
        with contextlib.suppress(OSError, ValueError):  # its owner has closed it
            signal.set_wakeup_fd(theirs)

    def finish(self) -> None:
        """After a stop: cancel the forced exit and restore the previous handlers."""
        self.unregister()

    def begin_deadline(self) -> None:
        """Start the deadline of the forced exit now, as a stopping signal does."""
        if self.timeout_sec > 0 and self.deadline is None:
            self.deadline = time.monotonic() + self.timeout_sec
            if self._originals:
                self._wake()

    def cancel_forced_exit(self) -> None:
        """Cancel the deadline, because everything is saved."""
        self.deadline = None
        self.timeout_sec = 0.0
        if self._originals:
            self._wake()

    def disown_children(self) -> None:
        """From now on a SIGTERM to a forked child is meant for it, and ends it."""
        self._children.disown()

    def _wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is awake already
            self._writer.send(b"\0")

    # -- reading -------------------------------------------------------------------------------

    @property
    def signal_received(self) -> signal.Signals | None:
        """The signal that decides how the process ends, or None."""
        if self._trips:
            self._drain_signals()
        return self._decisive

    @property
    def shutdown_requested(self) -> bool:
        """Whether a signal asked the process to stop."""
        return self.signal_received is not None

    def should_shutdown(self) -> bool:
        """Check whether to stop now; takes less than a microsecond, so call it after every step.

        Returns:
            Whether a signal asked the process to stop.
        """
        return self.signal_received is not None

    def explains(self, error: BaseException | None) -> bool:
        """Check whether a print failed because the terminal was closed.

        Prints fail an instant before the kernel sends SIGHUP, so this waits for the signal.

        Args:
            error: The exception that the print raised.
        Returns:
            Whether the output is closed and SIGHUP has come.
        """
        if not (isinstance(error, OSError) and error.errno in (errno.EIO, errno.EPIPE)):
            return False
        end = time.monotonic() + _HANGUP_S if _outputs_gone() else 0.0
        while self.signal_received is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.signal_received is signal.SIGHUP

    def take_save_request(self) -> bool:
        """Check whether a save was requested; True only once for each request.

        Returns:
            Whether a signal has asked for a save since the last call.
        """
        if self._trips:
            self._drain_signals()
        was_requested, self._is_save_requested = self._is_save_requested, False
        return was_requested

    def _drain_signals(self) -> None:
        if not self._originals:
            return
        if threading.current_thread() is threading.main_thread():
            self._reclaim_wakeup_fd()
        self._drain()

    def _reclaim_wakeup_fd(self) -> None:
        """Set our wakeup descriptor again, if other code (such as asyncio) has replaced it."""
        fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if fd != self._writer.fileno():
            self._outer_fd = fd
            for number in list(self._trips):  # these signals went to the other descriptor
                if number == signal.SIGINT and self._interrupts:
                    continue  # perhaps counted already; two would mean "exit immediately"
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(bytes([number]))
        self._trips.clear()

    @property
    def is_requeue(self) -> bool:
        """Whether the policy's action for the deciding signal is to requeue the job."""
        received = self.signal_received
        return received is not None and self.actions.get(received) == "requeue"

    @property
    def exit_code(self) -> int:
        """The exit code of a stop by the deciding signal."""
        received = self.signal_received
        if received is None:
            return int(ExitCode.FINISHED)
        return int(ExitCode.REQUEUE) if self.is_requeue else 128 + received

    # -- receiving -----------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The Python part of the handler, in the main thread, which it can interrupt."""
        self._trips[number] = None
        if self.signal_received is not None and self._interrupt is not None:
            self._interrupt()

    def _watch(self) -> None:
        """The thread: waits for signals and for the deadline."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(self.actions))
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while self._originals:
            deadline = self.deadline
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                self._force_exit()
            # The main thread can read the signal from the pipe, with the wake-up for its deadline.
            poll.poll(min(_LOOK_S, _LOOK_S if left_s is None else left_s) * 1000 + 1)
            self._drain()
            self._trips[0] = None  # other code can have replaced the descriptor
            asked_at = self.asked_at
            if self._is_notice_due and asked_at and time.monotonic() - asked_at >= _NOTICE_S:
                self._is_notice_due = False
                messages.say(
                    "Ctrl+C: the job saves and exits at the end of this step or evaluation."
                    " Pressing it again exits immediately, without a save."
                )

    def _drain(self) -> None:
        """Read all signals from the pipe; called from any thread."""
        if os.getpid() != self._pid:
            return  # a forked child: the signals are for its parent
        with self._lock:
            while True:
                try:
                    numbers = self._reader.recv(512)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    return  # unregistered meanwhile
                for number in numbers:
                    self._received(number)

    def _received(self, number: int) -> None:
        if number == 0:
            return  # a wake-up of our own
        if self._outer_fd != -1:
            try:
                os.write(self._outer_fd, bytes([number]))
            except OSError:
                self._outer_fd = -1  # its owner closed it
        if number not in self.actions:
            return  # not our signal: Python writes all signals into the pipe
        received = signal.Signals(number)
        action = self.actions[received]
        if received is signal.SIGTERM:
            self._children.note_sigterm()
        if action == "save":
            self._is_save_requested = True
        if action not in ("stop", "requeue") or (self._pass_over and self._pass_over(received)):
            return
        if received is signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                processes.kill_descendants()
                os._exit(ExitCode.INTERRUPTED)
            # A terminal interrupts all ranks, of which one says so.
            ranks = (os.environ.get("LOCAL_RANK"), os.environ.get("SLURM_LOCALID"))
            self._is_notice_due = next(filter(None, ranks), "0") == "0"
        # The first signal decides, except that Ctrl+C overrides it: no requeue is wanted then.
        if self._decisive is None or received is signal.SIGINT:
            self._decisive = received
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        if received is signal.SIGHUP:
            _let_go_of_outputs()
        self.begin_deadline()

    def _force_exit(self) -> None:
        """End the process now; a lock, a disk or a pipe must not delay this for long."""
        if self._before_force is not None:
            self._before_force()
        sink = open(os.devnull, "w")  # noqa: SIM115 - the process ends before it could be closed
        faulthandler.dump_traceback_later(10, exit=True, file=sink)
        try:
            self._dump_stacks()
            processes.kill_descendants()
        finally:
            os._exit(ExitCode.FORCED)

    def _dump_stacks(self) -> None:
        path = self.stacks_dir / f"stacks_{os.getpid()}.txt"
        try:
            make_directory(self.stacks_dir)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_file(path, flags), "a") as file:
                file.write(f"Stopping took longer than {self.timeout_sec:g} s. All threads:\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            where = f"the stacks of all threads are in {path}"
        except OSError as error:
            where = f"their stacks could not be written to {path}: {error}"
        messages.warn(
            f"Stopping took longer than {self.timeout_sec:g} s"
            f" (`resilience.shutdown.timeout_s`): forced exit with code 70; {where}"
            + (self._held_up_by() if self._held_up_by is not None else "")
        )
        messages.wait(_LAST_WORDS_S)  # on a busy machine, a message takes a while


def _let_go_of_outputs() -> None:
    """Redirect a closed stdout or stderr to /dev/null, since each print would raise an error."""
    for fd in _outputs_gone():
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)


def _outputs_gone() -> list[int]:
    """Which of stdout and stderr are a terminal or a pipe whose other end is closed."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return [fd for fd, events in poll.poll(0) if events & select.POLLERR]
