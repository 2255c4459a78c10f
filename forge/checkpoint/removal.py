"""Removing checkpoints: renamed immediately, deleted by a background thread.

The rename makes removal crash-safe: after a crash the checkpoint is whole, or it is hidden and the
next attempt deletes it. Deleting 10 GB takes seconds, and neither a save nor a stop waits for it.
If deleting fails (a read-only directory, NFS's `.nfs*` files, a reader), it is retried later.
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
from forge.checkpoint.retention import removing_lock
from forge.filesystem import durable

CLOSE_WAIT_S = 5.0
"""Seconds that a Run waits for the deletion in progress when it ends."""

_REPLACED = re.compile(r"replaced_(.+)-\d+")
"""Hidden names that can be renamed back after a crash; other hidden names are never restored."""


def replaced_in(work: Path) -> dict[str, Path]:
    """The checkpoints that a save in this work directory was replacing, by their visible name."""
    names = {path: _REPLACED.fullmatch(path.name) for path in work.iterdir()}
    return {name[1]: path for path, name in names.items() if name}


class Remover:
    """Removes checkpoints of one directory; its thread runs only while there is work."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._waiting: list[Path] = []
        """Paths that are hidden already and have to be deleted."""
        self._logged: set[int | None] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._number = 0

    def aside(self, path: Path, work: Path, kind: str = "removed") -> Path:
        """A unique hidden name in the work directory for the checkpoint at `path`."""
        self._number += 1
        return work / f"{kind}_{path.name}-{self._number:06d}"

    def take(self, path: Path, work: Path) -> bool:
        """Remove a checkpoint that the policy does not keep, unless it is being read.

        A failure is logged, and the next save tries again.
        """
        aside = self.aside(path, work)
        is_taken = False
        try:
            with removing_lock(path) as is_free:
                if not is_free:
                    return False
                os.rename(path, aside)
                is_taken = True
        except OSError as error:
            self._log(path, error)
        if is_taken:  # even if releasing the lock failed
            self.delete(aside)
        return is_taken

    def discard(self, path: Path, work: Path) -> None:
        """Remove a checkpoint from which no job can resume.

        Raises:
            OSError: If it could not be removed.
        """
        aside = self.aside(path, work, "discarded")
        os.rename(path, aside)
        self.delete(aside)

    @staticmethod
    def give_up(replaced: Path) -> Path:
        """Rename a replaced checkpoint so that it is never restored.

        Raises:
            OSError: If it could not be renamed.
        """
        aside = replaced.with_name(replaced.name.replace("replaced", "discarded", 1))
        os.rename(replaced, aside)
        return aside

    def delete(self, path: Path) -> None:
        """Delete a hidden path in the background."""
        with self._lock:
            self._waiting.append(path)
        self.retry()

    def retry(self) -> None:
        """Delete all waiting paths, also those that could not be deleted before."""
        with self._lock:
            if self._waiting and self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._work, name="forge-remove", daemon=True)
                # If the thread cannot start (shutdown, thread limit), the next attempt deletes.
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
            # Sync the renames first: a power cut must not leave half a visible checkpoint.
            durable.sync_directory(self._directory)
            return _delete(path)
        except OSError as error:
            self._log(path, error)
            return False

    def _log(self, path: Path, error: OSError) -> None:
        if error.errno not in self._logged:
            self._logged.add(error.errno)
            messages.warn(f"{path} could not be removed: {error}. Each save tries again.")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no deletion is in progress."""
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
        """Remove the work directory of a dead attempt; restore what it was about to replace.

        This runs in the calling thread: a full disk needs the space before the first save.

        Raises:
            OSError: If the directory cannot be read.
        """
        for path in sorted(left.iterdir(), reverse=True):  # newest first
            replaced = _REPLACED.fullmatch(path.name)
            try:
                if replaced and not os.path.lexists(self._directory / replaced[1]):
                    os.rename(path, self._directory / replaced[1])
            except OSError as error:
                self._log(path, error)
                return  # it can be the last good checkpoint: leave it to the next attempt
        self.delete_now(left)

    def delete_now(self, path: Path) -> None:
        """Delete in this thread; if that fails, each save tries again."""
        if not self._is_deleted(path):
            self._waiting.append(path)


def _delete(path: Path) -> bool:
    """Delete a file or directory; False while a process reads the checkpoint in it.

    Raises:
        OSError: The first error, after deleting as much as possible.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return True
        with removing_lock(path) as is_free:
            if not is_free:
                return False
            # The manifest first: without it, the rest does not count as a checkpoint.
            (path / manifest.NAME).unlink(missing_ok=True)
        for inner in path.iterdir():  # the work directory of a dead attempt contains checkpoints
            if inner.is_dir() and not inner.is_symlink() and not _delete(inner):
                return False
        shutil.rmtree(path, ignore_errors=True)  # deletes as much as possible
        shutil.rmtree(path)
    except FileNotFoundError:
        return True
    return True
