"""Holds the state of a boundary while functions of `run.every` run, so that a stop need not wait.

The state is kept as a copy, or on disk. A stop commits this copy and never the live objects, so it
does not matter what a function has changed or caught. A thread commits the copy when a stop is
requested; no function needs to poll.

With several ranks, all hold it or none. While the functions run, the ranks are at different places
and cannot meet in a collective. Once all know of a stop, a thread of each rank commits its part,
and each rank exits when its function allows it, or when the exit of another rank breaks the
collective it hangs in.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from forge import messages
from forge.training.parts import Parts

_COPIES = 10
"""A boundary is held if its functions take at least as long as this many copies of the state."""

_HEARD_S = 5.0
"""Seconds until all ranks know of a stop that broke a function on one of them."""

_LOOK_S = 0.02
"""Seconds between two checks whether all ranks know of a stop."""

_WATCH_S = 0.2
"""Seconds between two checks of the thread whether a stop is due."""


class PendingSnapshot:
    """The state of one boundary.

    Args:
        commit: Writes the copy to disk, unless the state is there already.
    """

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit: Callable[[], None] | None = commit
        self._lock = threading.RLock()  # re-entrant: a signal handler can interrupt commit()
        self._is_busy = False

    def commit(self) -> None:
        """Write the state, the first time that it is called; when it returns, the state is durable.

        Raises:
            CheckpointError: If it cannot be written; the next call tries again.
            DirectoryInUse: If a newer attempt has taken over the directory.
        """
        with self._lock:
            if self._commit is None or self._is_busy:
                return
            self._is_busy = True
            try:
                self._commit()
                self._commit = None
            finally:
                self._is_busy = False

    @contextmanager
    def watched(self, is_stopping: Callable[[], bool]) -> Iterator[None]:
        """In the block, a thread commits as soon as `is_stopping()`; joined at the end."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_WATCH_S):
                if is_stopping():
                    try:
                        self.commit()
                    except Exception as error:  # noqa: BLE001 - the main thread tries again
                        messages.warn(f"Could not save the state before the evaluation: {error}")
                    return

        thread = threading.Thread(target=watch, name="forge-held", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class SnapshotHolder:
    """Holds the boundaries of a run, one at a time."""

    def __init__(self, parts: Parts) -> None:
        self._group = parts.group
        self._exchange = parts.exchange
        self._saver = parts.saver
        self._loops = parts.loops
        self._train_state = parts.train_state
        self._shutdown = parts.shutdown
        self._stops = parts.stops
        self._is_alone = parts.group.size == 1
        self._hold_s = 0.0
        """Seconds that the last copy took."""
        self._boundary = self._requested = 0
        """The boundary that all ranks hold, and the one for which this rank requested a stop."""
        self.held: PendingSnapshot | None = None

    def is_worth(self, last_s: float) -> bool:
        """Whether to hold a boundary for functions that took `last_s` seconds."""
        return last_s >= _COPIES * self._hold_s

    def hold(self) -> None:
        """Hold the current state.

        Raises:
            CheckpointError: If there is no memory for a copy, and it cannot be written.
        """
        began = time.monotonic()
        commit = self._saver.hold(
            self._loops.step, self._train_state.capture, may_write=self._is_alone
        )
        self.held = None if commit is None else PendingSnapshot(commit)
        self._hold_s = time.monotonic() - began

    def hold_together(self, last_s: float, boundary: int) -> None:
        """Hold the state on all ranks or none, if it is worth it on at least one."""
        give = self._exchange.all_gather
        with self._shutdown.giving_up():
            if any(give("an evaluation", lambda: self.is_worth(last_s))):
                is_held = give("a held boundary", lambda: self._is_held(boundary))
                if not all(is_held):
                    self._group.let_go()
                    self.held = None

    def _is_held(self, boundary: int) -> bool:
        """Hold the state and tell the group, before another rank can request a stop."""
        self.hold()
        if self.held is not None:
            self._boundary = boundary
            self._group.hold(boundary)
        return self.held is not None

    def let_go(self) -> None:
        """The functions have returned on all ranks, or all ranks know of a stop."""
        with self._shutdown.giving_up():
            request = self._group.let_go()
        if request is not None and self.held is not None:
            self._shutdown.stop(request, self.held.commit)
        self.held = None

    def discard(self) -> None:
        """Forget the held state: it must not be saved any more."""
        self.held = None

    def is_stop_due(self) -> bool:
        """Whether to commit the held state; also requests a stop on the other ranks."""
        if self._is_alone:
            return self._stops.is_stopping
        if self._requested != self._boundary and self._stops.is_stopping:
            self._requested = self._boundary
            self._group.propose(replace(self._stops.stop_request(), boundary=self._boundary))
        return self._group.held_stop() is not None

    def stop_if_due(self, within_s: float = 0.0) -> None:
        """Commit the held state and exit if a stop is due; else return."""
        if self.held is None:
            return
        until = time.monotonic() + within_s
        while not (is_due := self.is_stop_due()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if is_due:
            request = self._group.held_stop() or self._stops.stop_request()
            self._shutdown.stop(request, self.held.commit)

    def stop_by(self, error: Exception, explains: Callable[[Exception], bool]) -> None:
        """Exit if an error in a function was caused by a stop; else return."""
        is_known = self._stops.is_stopping or self._group.held_stop() is not None
        if self.held is not None and (is_known or explains(error)):
            messages.warn(
                f"A run.every function raised {type(error).__name__} after a stop was requested:"
                f" {error}"
            )
            self.stop_if_due(_HEARD_S)

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """In the block, a thread commits the held state once a stop is due."""
        held = self.held
        return contextlib.nullcontext() if held is None else held.watched(self.is_stop_due)
