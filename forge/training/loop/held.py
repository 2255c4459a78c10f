"""A held boundary: its state, as a copy or on disk, while functions of `run.every` run.

What a stop commits is this and never the live objects: so it does not matter what a function has
swapped, switched or caught. Nobody need poll for it: a thread commits once a stop is due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge import messages

_LOOK_S = 0.2


class Held:
    """One boundary.

    Args:
        commit: Writes the copy to disk; None where it is there already.
    """

    def __init__(self, commit: Callable[[], None] | None) -> None:
        self._commit = commit
        self._lock = threading.RLock()  # re-entrant: a handler may interrupt the main thread in it
        self._is_busy = False

    def commit(self) -> None:
        """Once, whoever comes first; when this returns it survives a power cut.

        Raises:
            CheckpointError: Where it could not be written; the next call tries again.
            DirectoryInUse: Where a newer attempt has taken over.
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
        """Meanwhile a thread commits it as soon as `is_stopping()`; it is joined at the end."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_LOOK_S):
                if is_stopping():
                    try:
                        self.commit()
                    except Exception as error:  # noqa: BLE001 - the main thread tries again
                        messages.warn(f"The state before the evaluation was not saved: {error}")
                    return

        thread = threading.Thread(target=watch, name="forge-held", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
