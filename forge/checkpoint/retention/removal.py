"""Taking checkpoints away: renamed at once, deleted by a thread.

The rename makes it crash-safe: there is a whole checkpoint, or none, and a hidden leftover that the
next attempt removes. Deleting 10 GB takes seconds, which neither a save nor a stop waits for. What
cannot be deleted now (a read-only directory, NFS's `.nfs*` files, a reader) is tried again later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from pathlib import Path

from forge import messages
from forge.checkpoint.format import manifest
from forge.checkpoint.retention import pins
from forge.checkpoint.retention.in_use import removing_lock
from forge.errors import DamagedCheckpoint, NewerFormat
from forge.filesystem import durable

CLOSE_WAIT_S = 5.0
"""Seconds that a run which ends waits for what is being deleted."""

_ASIDE = re.compile(r"(replaced|removed)_(.+)-\d+")
"""What may belong back where it was, if its place is empty; what is `discarded` never does."""


class Remover:
    """Removes directories of one checkpoint directory, with one thread while there is work."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._waiting: list[Path] = []
        """What has a hidden name, and is to be deleted."""
        self._told: set[int | None] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._number = 0

    def aside(self, path: Path, work: Path, kind: str = "removed") -> Path:
        """A name of its own, in the work directory, for what stands at `path`."""
        self._number += 1
        return work / f"{kind}_{path.name}-{self._number:06d}"

    def take(self, path: Path, work: Path) -> bool:
        """Take away a checkpoint that the policy does not keep, unless it is read or pinned.

        A failure is logged and left for the next pass.
        """
        aside = self.aside(path, work)
        is_taken = False
        try:
            with removing_lock(path) as is_free:
                if not is_free or pins.is_pinned(path):
                    return False
                os.rename(path, aside)
                try:
                    # `pins.pin` looks after it wrote: either it finds nothing, or we find the pin.
                    is_taken = not pins.is_pinned(path)
                finally:
                    if not is_taken:
                        os.rename(aside, path)
        except OSError as error:
            self._log(path, error)
        if is_taken:  # though letting go of the lock may have failed
            self.delete(aside)
        return is_taken

    def discard(self, path: Path, work: Path) -> None:
        """Take away a checkpoint that must not be found again; a pinned one gets another name.

        Raises:
            OSError: Where it is still in place.
        """
        if not pins.is_pinned(path):
            aside = self.aside(path, work, "discarded")
            os.rename(path, aside)
            self.delete(aside)
            return
        kept = path.with_name(f"rolled_back_{path.name}")
        while os.path.lexists(kept):
            self._number += 1
            kept = path.with_name(f"rolled_back_{path.name}-{self._number}")
        os.rename(path, kept)
        pins.pin_file(path).unlink(missing_ok=True)
        messages.warn(
            f"{path.name} was pinned, but belongs to a time line that was rolled back: it is kept"
            f" as {kept}, and no run resumes from it."
        )

    @staticmethod
    def give_up(replaced: Path) -> Path:
        """Another name for what was replaced, under which it never comes back.

        Raises:
            OSError: Where it has not got it.
        """
        aside = replaced.with_name(replaced.name.replace("replaced", "discarded", 1))
        os.rename(replaced, aside)
        return aside

    def delete(self, path: Path) -> None:
        """Delete beside training what has a hidden name already."""
        with self._lock:
            self._waiting.append(path)
        self.retry()

    def retry(self) -> None:
        """Delete what waits, also what could not be deleted before."""
        with self._lock:
            if self._waiting and self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._work, name="forge-remove", daemon=True)
                # The interpreter is shutting down, or there are no threads left: a leftover.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def _work(self) -> None:
        failed: list[Path] = []
        while True:
            with self._lock:
                if self._is_closed or not self._waiting:
                    self._waiting += failed
                    self._thread = None
                    return
                path = self._waiting.pop(0)
            if not self._is_deleted(path):
                failed.append(path)

    def _is_deleted(self, path: Path) -> bool:
        try:
            # The renames first: after a power cut there must not be half a checkpoint.
            durable.sync_directory(self._directory)
            return _delete(path)
        except OSError as error:
            self._log(path, error)
            return False

    def _log(self, path: Path, error: OSError) -> None:
        if error.errno not in self._told:
            self._told.add(error.errno)
            messages.warn(f"{path} could not be removed: {error}. Each save tries it again.")

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no deletion is under way."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def close(self) -> None:
        """Let the thread finish, for `CLOSE_WAIT_S` at most; the next attempt removes the rest."""
        self.wait(CLOSE_WAIT_S)
        with self._lock:
            self._is_closed = True

    def clear(self, left: Path) -> None:
        """Remove the work directory that an attempt left; put back what it was about to replace.

        In this thread: a disk that is full needs the room before the first save.

        Raises:
            OSError: Where the directory cannot be read.
        """
        for path in sorted(left.iterdir(), reverse=True):  # the last one aside comes first
            aside = _ASIDE.fullmatch(path.name)
            try:
                if aside and self._belongs_back(path, aside[1], aside[2]):
                    os.rename(path, self._directory / aside[2])
            except OSError as error:
                self._log(path, error)
                return  # it may be the last good one: for the next attempt
        self.delete_now(left)

    def delete_now(self, path: Path) -> None:
        """Delete in this thread; what fails is tried again at each save."""
        if not self._is_deleted(path):
            self._waiting.append(path)

    def _belongs_back(self, path: Path, kind: str, name: str) -> bool:
        """Whether a kill fell between two renames, the second of which is its way back."""
        place = self._directory / name
        if os.path.lexists(place):
            return False
        if kind == "replaced":
            return True
        try:  # pinned while it was being removed, and nothing of it is deleted yet
            manifest.check_sizes(path, manifest.read(path))
        except NewerFormat:
            pass  # this forge cannot say whether it is whole
        except DamagedCheckpoint:
            return False
        return pins.is_pinned(place)


def _delete(path: Path) -> bool:
    """Delete a directory, or whatever it is; False while somebody reads it.

    Raises:
        OSError: The first error; what could be deleted is.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return True
        with removing_lock(path) as is_free:
            if not is_free:
                return False
            # First: without its manifest nobody takes what is left for a checkpoint.
            (path / manifest.NAME).unlink(missing_ok=True)
        for inner in path.iterdir():  # in what an attempt left lie whole checkpoints
            if inner.is_dir() and not inner.is_symlink() and not _delete(inner):
                return False
        shutil.rmtree(path, ignore_errors=True)  # all that can be deleted
        shutil.rmtree(path)
    except FileNotFoundError:
        return True
    return True
