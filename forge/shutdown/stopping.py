"""How a process leaves: callbacks, child processes, and an exit that does not hang.

A process has one set of signal handlers and one list of callbacks, so this module holds them for
the whole process. Until a `forge.Run` is active a stopping signal raises `Exit` in the main
thread at once, since there is nothing to save; while one is active, its loop decides when.
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
from forge.errors import Exit, ExitCode, ForgeError, Reason
from forge.jobdir import ledger, verdict
from forge.jobdir.job_files import TOKEN
from forge.process import processes
from forge.process.announcement import Announcement
from forge.shutdown import interpreter_exit
from forge.shutdown.signal_handler import ShutdownHandler

CALLBACK_TIMEOUT_S = 10.0
LEAVE_S = 10.0
"""Seconds that atexit handlers, `finally` blocks and threads have after everything is saved."""

UNFORCED_S = 90.0
"""Seconds for the jobs of a sweep that main has started, where no deadline forces an exit."""

_Callback = TypeVar("_Callback", bound=Callable[[], object])


class Requeuer(Protocol):
    """Has the job started again; the training process is handed one, and knows no scheduler."""

    @property
    def command(self) -> str:
        """How to do it by hand."""

    def requeue(self, code: int, reason: Reason) -> int:
        """The last act of a process that leaves with this code.

        Args:
            code: What the process would end with.
            reason: Why, as far as the process knows.
        Returns:
            What it ends with.
        """


class _State:
    def __init__(self) -> None:
        self.callbacks: list[tuple[Callable[[], object], float]] = []
        self.handler: ShutdownHandler | None = None
        self.announcement: Announcement | None = None
        """Of the time limit, while no Run looks at the clock itself."""
        self.is_leaving = False
        self.leave_s = LEAVE_S
        self.on_unsaved_stop: Callable[[str, int], None] | None = None
        """Told (signal, exit code) when a stop found nothing to save."""
        self.job: Path | None = None
        """The directory of the job, if its main can train in child processes; otherwise None."""
        self.requeuer: Requeuer | None = None
        self.last_code: int | None = None
        """What the last act has said; None before it."""
        self.acting = threading.Lock()


_state = _State()
_find_requeuer: list[Callable[[Policy, Path], Requeuer | None]] = []


def on_stop(callback: _Callback, timeout_s: float = CALLBACK_TIMEOUT_S) -> _Callback:
    """Call `callback()` when the process is stopped: by a signal, or by the NaN policy.

    Callbacks run after the save, the last registered one first; one that fails or takes too long
    does not keep the next from running. Works before a Run exists, in the main thread.

    Args:
        callback: A function without arguments.
        timeout_s: Seconds after which the stop continues without it.
    Returns:
        The callback, so that this can be used as a decorator.
    Raises:
        RuntimeError: In another thread, before anything registered the signal handlers.
    """
    if _state.handler is None:
        install(Policy())
    _state.callbacks.append((callback, timeout_s))
    return callback


def remove_callback(callback: Callable[[], object]) -> None:
    """Forget a callback; one that was never registered is no error."""
    _state.callbacks = [entry for entry in _state.callbacks if entry[0] is not callback]


def install(policy: Policy, stacks_dir: Path | None = None) -> ShutdownHandler:
    """Make this process listen to signals as `policy` says; the one handler is reused."""
    actions = {name: action.value for name, action in policy.signal.actions.items()}
    if _state.handler is not None and _state.handler.is_of_parent:
        _state.__init__()  # type: ignore[misc]
    if _state.handler is None:
        handler = ShutdownHandler(policy.stop_s, actions, stacks_dir)
        handler.before_force = lambda: last_act(int(ExitCode.FORCED), Reason.forced)
        handler.register()
        handler.interrupt_with(_leave_unsaved)
        _state.handler = handler
        atexit.register(_at_exit)
    else:
        _state.handler.configure(policy.stop_s, actions, stacks_dir)
    warning_s = policy.signal.warning_s
    due_s = min(policy.stop_s or warning_s, warning_s)
    _state.announcement = Announcement(policy.signal.name, due_s, stacks_dir)
    _state.handler.pass_over = _state.announcement.put_off
    return _state.handler


def is_installed() -> bool:
    """Whether this process listens to signals already."""
    return _state.handler is not None


def is_stopping() -> bool:
    """Whether a stop is under way: a signal has asked for one, or the process is leaving."""
    handler = _state.handler
    return _state.is_leaving or (handler is not None and handler.should_shutdown())


def uninstall() -> None:
    """Back to the handlers that were there before forge; no stop is under way any more."""
    _state.is_leaving, _state.requeuer, _state.last_code = False, None, None
    if _state.handler is not None:
        _state.handler.unregister()
        _state.handler = None
        atexit.unregister(_at_exit)


def allow(leave_s: float) -> None:
    """Give the main thread so many seconds after a stop: it has to ask somebody, perhaps."""
    _state.leave_s = leave_s


def on_unsaved_stop(tell: Callable[[str, int], None]) -> None:
    """Call `tell(signal, exit code)` where a stop finds nothing to save."""
    _state.on_unsaved_stop = tell


def has_job(directory: Path) -> None:
    """A stop waits for children of this process that train in a Run of the job there."""
    _state.job = directory


def offer_requeuer(find: Callable[[Policy, Path], Requeuer | None]) -> None:
    """`find(policy, job directory)` says who starts a job of this process again, if anybody."""
    _find_requeuer[:] = [find]


def requeuer(policy: Policy, job: Path) -> Requeuer | None:
    """Who starts the job again whose process this is; a stop ends with that. None: nobody does."""
    _state.requeuer = _find_requeuer[0](policy, job) if _find_requeuer else None
    return _state.requeuer


def last_act(code: int, reason: Reason) -> int:
    """Have the job started again, if somebody does that; once, by whichever thread comes first.

    Args:
        code: What this process would end with.
        reason: Why.
    Returns:
        What it ends with.
    """
    with _state.acting:
        if _state.requeuer is None:
            return code
        if _state.last_code is None:
            _state.last_code = _state.requeuer.requeue(code, reason)
        return _state.last_code


def hold_interrupts(*, is_held: bool) -> None:
    """While held, a stopping signal only sets the flag: a Run will read it."""
    if _state.handler is not None:
        _state.handler.held_up_by = None  # no Run is there, or not yet
        if _state.announcement is not None:
            _state.handler.pass_over = _state.announcement.put_off
        _state.handler.interrupt_with(None if is_held else _leave_unsaved)


def _leave_unsaved() -> None:
    """A stopping signal outside a Run: nothing to save here, so leave once the children have."""
    handler = _state.handler
    assert handler is not None
    if _state.is_leaving:
        return
    _state.is_leaving = True
    received = handler.signal_received
    assert received is not None
    name, code = received.name, handler.exit_code
    if _state.job is not None and _stop_trainers(_state.job, received):
        _state.on_unsaved_stop = None
        said = verdict.of_child(_state.job)
        # A signal that came to all of them may have another code there; an error says more.
        code = said if 0 < said < 128 and said != ExitCode.REQUEUE else code
    threading.Thread(target=_finish_outside, args=(name, code), name="forge-stop").start()
    raise Exit(code, f"stopped by {name}")


def _stop_trainers(job: Path, received: signal.Signals) -> bool:
    """Stop the children that are in a Run, and wait for them; the forced exit is the limit.

    Returns:
        Whether there are any.
    """
    pids = sorted(ledger.trainers(job).intersection(processes.descendants()))
    # A terminal sends SIGINT to all of them by itself: twice would mean at once.
    number = signal.SIGTERM if received is signal.SIGINT else received
    for pid in pids:
        processes.send(pid, number)
    while processes.wait_gone(pids, 60.0):
        pass
    return bool(pids)


def _finish_outside(name: str, code: int) -> None:
    """Clean up once the main thread has unwound.

    A thread of its own, not a daemon: the interpreter waits for it, and it can end the executors
    that the interpreter waits for as well.
    """
    threading.main_thread().join(timeout=_state.leave_s / 2)
    if _state.on_unsaved_stop is not None:
        _state.on_unsaved_stop(name, code)
    clean_up(_left_s())
    reason = Reason.of_code(code)
    last_act(code, reason)
    _start_guard(code, reason)


def leave(code: int, text: str, reason: Reason | None = None) -> Exit:
    """Everything is saved: run the callbacks, end the children, and say how to exit.

    Returns:
        The `Exit` to raise. Should unwinding then take longer than `LEAVE_S` seconds (a thread
        that never ends, an executor, a logger's atexit), the process is ended all the same.
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
    """Seconds until the forced exit, or those it would allow: jobs of a sweep inside may save."""
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
    with _without_sigchld():
        processes.end_descendants(os.environ.get(TOKEN), save_s)


@contextmanager
def _without_sigchld() -> Iterator[None]:
    """SIGCHLD's handlers stand again afterwards: DataLoader's, and behind it the user's own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Any = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def forgiving(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except RuntimeError:  # DataLoader's, at the end of any child: its workers are gone
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
    """The last of the atexit handlers (the first registered)."""
    if _state.is_leaving and _state.handler is not None:
        # The interpreter resets handlers to the default before it ends: a signal would kill it.
        for number in _state.handler.actions:
            signal.signal(number, signal.SIG_IGN)
        interpreter_exit.fast_exit()


@contextmanager
def block_signals() -> Iterator[None]:
    """Processes started inside ignore TERM, INT, HUP, USR1 and USR2.

    Slurm signals every process of a step. Start helpers that must outlive such a signal (a
    logger's service, a pool of spawned workers) inside this block; forge ends them when the job
    stops. Helpers that this process forks need no shield.

    Raises:
        ForgeError: Where the platform has no POSIX signals.
    """
    if not hasattr(signal, "pthread_sigmask"):
        raise ForgeError("forge.block_signals() needs POSIX signals, which this platform lacks")
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
