"""The state of a boundary, kept as a copy or on disk while functions of `run.every` run.

A stop commits this copy and never the live objects, so it does not matter what a function has
changed or caught. A thread commits the copy when a stop is requested; no function needs to poll.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge import messages

_LOOK_S = 0.2


class PendingSnapshot:
    """The state of one boundary.

    Args:
        commit: Writes the copy to disk; None if the state is on disk already.
    """

    def __init__(self, commit: Callable[[], None] | None) -> None:
        self._commit = commit
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
            while not is_over.wait(_LOOK_S):
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
