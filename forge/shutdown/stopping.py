"""How a process shuts down: callbacks, child processes, and an exit that does not hang.

The signal handlers and the callbacks exist once in a process, so this module has them as global
state. Without an active `forge.Run` there is nothing to save, so a stopping signal immediately
raises `Exit` in the main thread; the loop of an active Run stops at its next boundary.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from forge import messages
from forge.config.schema import Policy
from forge.errors import Exit, ExitCode, Reason
from forge.jobdir.job_files import TOKEN
from forge.process import processes
from forge.process.processes import block_signals as block_signals
from forge.process.time_limit import Announcement
from forge.shutdown import interpreter_exit
from forge.shutdown.signal_handler import ShutdownHandler

CALLBACK_TIMEOUT_S = 10.0
LEAVE_S = 10.0
"""Seconds that atexit handlers, `finally` blocks and threads have after everything is saved."""

UNFORCED_S = 90.0
"""Seconds for the jobs of a sweep that main has started, if no deadline forces an exit."""

_Callback = TypeVar("_Callback", bound=Callable[[], object])


class Requeuer(Protocol):
    """Starts the job again; the training process gets one, so that it needs no scheduler."""

    @property
    def command(self) -> str:
        """The shell command that does it by hand."""

    def requeue(self, code: int, reason: Reason) -> int:
        """Start the job again, as the last act of a process that exits.

        Args:
            code: The exit code that the process would have.
            reason: Why it exits, as far as the process knows.
        Returns:
            The exit code of the process.
        """


class _State:
    def __init__(self) -> None:
        self.callbacks: list[tuple[Callable[[], object], float]] = []
        self.handler: ShutdownHandler | None = None
        self.announcement: Announcement | None = None
        """The clock of the time limit, as long as no Run checks the time itself."""
        self.is_leaving = False
        self.leave_s = LEAVE_S
        self.on_unsaved_stop: Callable[[str, int], None] | None = None
        """Called with (signal, exit code) if a stop finds nothing to save."""
        self.requeuer: Requeuer | None = None
        self.has_own_requeuer = False
        """Whether the requeuer is that of `use_requeuer`."""
        self.last_code: int | None = None
        """The exit code from the last act; None before it."""
        self.acting = threading.Lock()


_state = _State()
_SHOWN = 4
"""Number of child processes that one message names."""
_told_of: set[int | None] = set()
"""The pids of children that `warn_of_children` has named."""
_find_requeuer: list[Callable[[Policy, Path], Requeuer | None]] = []


def on_stop(callback: _Callback, timeout_s: float = CALLBACK_TIMEOUT_S) -> _Callback:
    """Call `callback()` when the process is stopped: by a signal, or by the NaN policy.

    Callbacks run after the save, the last registered one first. If a callback fails or takes too
    long, the next one still runs. Before a Run exists, call this in the main thread.

    Args:
        callback: A function without arguments.
        timeout_s: Seconds after which the stop continues without waiting for the callback.
    Returns:
        The callback, so that this can be used as a decorator.
    Raises:
        RuntimeError: Outside the main thread, if no Run exists yet.
    """
    if _state.handler is None:
        install(Policy())
    _state.callbacks.append((callback, timeout_s))
    return callback


def remove_callback(callback: Callable[[], object]) -> None:
    """Remove a callback; nothing happens if it was never registered."""
    _state.callbacks = [entry for entry in _state.callbacks if entry[0] is not callback]


def install(policy: Policy, stacks_dir: Path | None = None) -> ShutdownHandler:
    """Handle signals in this process according to `policy`; reconfigures an existing handler."""
    actions = {name: action.value for name, action in policy.signal.actions.items()}
    if _state.handler is not None and _state.handler.is_of_parent:
        _state.__init__()  # type: ignore[misc]
    if _state.handler is None:
        last = lambda: last_act(int(ExitCode.FORCED), Reason.forced)  # noqa: E731
        handler = ShutdownHandler(policy.stop_s, actions, stacks_dir, last)
        handler.register()
        _state.handler = handler
        atexit.register(_at_exit)
    else:
        _state.handler.configure(policy.stop_s, actions, stacks_dir)
    warning_s = policy.signal.warning_s
    due_s = min(policy.stop_s or warning_s, warning_s)
    _state.announcement = Announcement(policy.signal.name, due_s, stacks_dir)
    hold_interrupts(is_held=False)
    return _state.handler


def warn_of_children() -> None:
    """Say once which child processes a SIGTERM to all processes would end, as Slurm sends it."""
    if _state.handler is None:
        return
    import multiprocessing

    children = [one for one in multiprocessing.active_children() if one.pid not in _told_of]
    found = [one for one in children if processes.is_ended_by(one.pid or 0, signal.SIGTERM)]
    _told_of.update(one.pid for one in found)
    if found:
        names = ", ".join([one.name for one in found][:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        messages.warn(
            "A SIGTERM to all processes of the job, as Slurm sends it before a preemption, would"
            f" end these child processes: {names}{more}. A step that waits for them could not end"
            " then, and the stop would save nothing. Start them in a block"
            " `with forge.block_signals():`."
        )


def is_installed() -> bool:
    """Whether this process handles signals already."""
    return _state.handler is not None


def is_stopping() -> bool:
    """Whether a signal has requested a stop, or the process is shutting down."""
    handler = _state.handler
    return _state.is_leaving or (handler is not None and handler.should_shutdown())


def uninstall() -> None:
    """Restore the handlers from before forge, and forget a stop in progress."""
    _state.is_leaving, _state.requeuer, _state.last_code = False, None, None
    _state.has_own_requeuer = False
    if _state.handler is not None:
        _state.handler.unregister()
        _state.handler = None
        atexit.unregister(_at_exit)


def allow(leave_s: float) -> None:
    """Give the main thread more seconds after a stop, for example to ask Slurm's controller."""
    _state.leave_s = leave_s


def on_unsaved_stop(tell: Callable[[str, int], None]) -> None:
    """Call `tell(signal, exit code)` if a stop finds nothing to save."""
    _state.on_unsaved_stop = tell


def offer_requeuer(find: Callable[[Policy, Path], Requeuer | None]) -> None:
    """Register `find(policy, job directory)`, which returns the job's `Requeuer`, or None.

    `forge/__init__.py` does, as it loads `forge.Run`.
    """
    _find_requeuer[:] = [find]


def use_requeuer(requeuer: Requeuer) -> None:
    """Let `requeuer` act last in this process, in place of those that a Run would find."""
    _state.requeuer, _state.has_own_requeuer = requeuer, True


def requeuer(policy: Policy, job: Path) -> Requeuer | None:
    """The `Requeuer` of this process's job, which a stop calls last; None if there is none."""
    if _state.has_own_requeuer:
        return _state.requeuer
    _state.requeuer = _find_requeuer[0](policy, job) if _find_requeuer else None
    return _state.requeuer


def last_act(code: int, reason: Reason) -> int:
    """Call the job's `Requeuer`, if there is one; only once, by the first thread that gets here.

    Args:
        code: The exit code that this process would have.
        reason: Why it exits.
    Returns:
        The exit code of this process.
    """
    with _state.acting:
        if _state.requeuer is None:
            return code
        if _state.last_code is None:
            _state.last_code = _state.requeuer.requeue(code, reason)
        return _state.last_code


def hold_interrupts(*, is_held: bool) -> None:
    """While held, a stopping signal only sets the flag, which a Run reads."""
    if _state.handler is not None and _state.announcement is not None:
        interrupt = None if is_held else _leave_unsaved
        _state.handler.interrupt_with(interrupt, pass_over=_state.announcement.put_off)


def leave_if_asked() -> None:
    """Stop outside a Run, if a signal came while interrupts were held."""
    if _state.handler is not None and _state.handler.should_shutdown():
        _leave_unsaved()


def _leave_unsaved() -> None:
    """Stop outside a Run: nothing has to be saved here, so exit."""
    handler = _state.handler
    assert handler is not None
    if _state.is_leaving:
        return
    _state.is_leaving = True
    received = handler.signal_received
    assert received is not None
    name, code = received.name, handler.exit_code
    threading.Thread(target=_finish_outside, args=(name, code), name="forge-stop").start()
    raise Exit(code, f"stopped by {name}")


def _finish_outside(name: str, code: int) -> None:
    """Clean up once the main thread has unwound.

    In a thread that is not a daemon: the interpreter waits for it, and it can end the executors
    for which the interpreter waits as well.
    """
    threading.main_thread().join(timeout=_state.leave_s / 2)
    if _state.on_unsaved_stop is not None:
        _state.on_unsaved_stop(name, code)
    clean_up(_left_s())
    reason = Reason.of_code(code)
    last_act(code, reason)
    _start_guard(code, reason)


def leave(code: int, text: str, reason: Reason | None = None) -> Exit:
    """After everything is saved: run the callbacks, end the children, and return the `Exit`.

    Returns:
        The `Exit` to raise. If the exit then takes longer than `LEAVE_S` seconds (a thread that
        never ends, an executor, a logger's atexit handler), the process is killed.
    """
    _state.is_leaving = True
    left_s = _left_s()
    if _state.handler is not None:
        _state.handler.cancel_forced_exit()
    clean_up(left_s)
    exit_ = Exit(code, text, reason)
    _start_guard(code, exit_.reason)
    return exit_


def _left_s() -> float:
    """Seconds in which jobs of a sweep inside this process can save, until the forced exit."""
    handler = _state.handler
    if handler is not None and handler.deadline is not None:
        return max(handler.deadline - time.monotonic(), 0.0)
    return (handler.timeout_sec if handler is not None else 0.0) or UNFORCED_S


def clean_up(save_s: float) -> None:
    """Run the callbacks, then end every child process.

    Args:
        save_s: Seconds for the jobs of a sweep that this process has started.
    """
    callbacks, _state.callbacks = _state.callbacks[::-1], []
    for callback, timeout_s in callbacks:
        _run_bounded(callback, timeout_s)
    if _state.handler is not None:
        _state.handler.disown_children()
    with _without_sigchld():
        processes.end_descendants(os.environ.get(TOKEN), save_s)


@contextmanager
def _without_sigchld() -> Iterator[None]:
    """Replace SIGCHLD's handlers meanwhile: DataLoader's, and the user's, which it calls."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Any = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def forgiving(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except RuntimeError:  # DataLoader raises it at the end of any child: its workers have ended
            if not _state.is_leaving:
                raise

    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, forgiving if callable(handler) else handler or signal.SIG_DFL)


def _run_bounded(callback: Callable[[], object], timeout_s: float) -> None:
    name = getattr(callback, "__qualname__", repr(callback))

    def guarded() -> None:
        try:
            callback()
        except BaseException:  # noqa: BLE001 - a callback must not keep the next from running
            messages.say(f"on_stop callback {name} failed", logging.ERROR)
            sys.excepthook(*sys.exc_info())

    thread = threading.Thread(target=guarded, name=f"forge-on-stop-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        messages.warn(
            f"on_stop callback {name} took longer than {timeout_s:g} s; continuing without it"
        )


def _start_guard(code: int, reason: Reason) -> None:
    def end() -> None:
        time.sleep(_state.leave_s)  # the event waited for is the end of this process
        last = last_act(code, reason)
        processes.kill_descendants()
        os._exit(last)

    threading.Thread(target=end, name="forge-leave", daemon=True).start()


def _at_exit() -> None:
    """The last atexit handler (the first registered)."""
    if _state.is_leaving and _state.handler is not None:
        # The interpreter resets handlers to the default before it exits: a signal would kill it.
        for number in _state.handler.actions:
            signal.signal(number, signal.SIG_IGN)
        interpreter_exit.fast_exit()
