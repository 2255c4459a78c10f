"""Where an attempt writes before anything has its name, and what it takes out of the way.

Every rename of a save or a removal leads out of the attempt's own work directory or into it. A
newer attempt takes that directory away when it claims: from then on each of those renames fails,
even of a zombie that checked the token an instant before. A check alone would leave that instant.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from forge.checkpoint.ownership.fence import TOKEN_FILE, Fence
from forge.checkpoint.retention.removal import Remover
from forge.errors import DirectoryInUse
from forge.filesystem import durable

_WORK, _LEFT = ".work_", ".left_"
_LEFTOVERS = (".step_", f"{TOKEN_FILE}.tmp-")
"""Of a health check, and of a claim."""


class Workspace:
    """The work directory of one attempt; there is none while nothing is written."""

    def __init__(self, directory: Path, fence: Fence, remover: Remover) -> None:
        """Take away those of older attempts, and put back what they were about to replace."""
        self._directory = directory
        self._fence = fence
        self._remover = remover
        self._path = directory / f"{_WORK}{fence.name}"
        self._take_over()

    def _take_over(self) -> None:
        for path in list(self._directory.iterdir()):
            if path.name.startswith(_WORK) and path != self._path:
                if self._fence.is_older_than(path.name.removeprefix(_WORK)):
                    raise DirectoryInUse(f"{self._directory} belongs to a newer attempt: {path}")
                if path.is_symlink():  # nobody's work: it would be done elsewhere
                    self._remover.delete_now(path)
                    continue
                # One rename: whoever writes there has all of it until then, and nothing after.
                left = path.with_name(_LEFT + path.name.removeprefix(_WORK))
                with contextlib.suppress(FileNotFoundError):  # its owner is leaving
                    os.rename(path, left)
                    self._remover.clear(left)
            elif path.name.startswith(_LEFT):
                self._remover.clear(path)
            elif path.name.startswith(_LEFTOVERS):
                self._remover.delete_now(path)

    @contextlib.contextmanager
    def entered(self) -> Iterator[Path]:
        """The directory, while this attempt may write.

        Raises:
            DirectoryInUse: Where a newer attempt has taken over, before or meanwhile.
            FileNotFoundError: Where the checkpoint directory is away, or an empty one in its place.
        """
        self.check()  # before mkdir: an empty directory may be a bare mount point
        try:
            self._path.mkdir(exist_ok=True)
            if self._path.is_symlink():
                raise OSError(errno.ELOOP, "is a link: remove it", str(self._path))
            try:
                self.check()  # after mkdir: a newer attempt that claims from now on finds it
            except BaseException:
                self.close()
                raise
            yield self._path
        except FileNotFoundError:
            self.check()
            raise

    def check(self) -> None:
        """Raise DirectoryInUse where a newer attempt has claimed the directory."""
        if self._fence.check():
            self._take_over()

    def put_in_place(self, temporary: Path, final: Path) -> None:
        """Give what was written in the work directory its name, durably.

        One that has the name already, damaged or not complete, is moved here until the new one is
        durably in its place; a death in between is put right by the next attempt. After that it
        gets another name: it must not come back when the new one is removed, in a rollback say.
        """
        if not os.path.lexists(final):
            os.rename(temporary, final)
            durable.sync_directory(self._directory)
            return
        aside = self._remover.aside(final, self._path, "replaced")
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except BaseException:
            os.rename(aside, final)
            raise
        try:
            durable.sync_directory(self._directory)
            with contextlib.suppress(OSError):  # it is in nobody's way
                aside = self._remover.give_up(aside)
                durable.sync_directory(self._path)
        finally:
            self._remover.delete(aside)  # which syncs the directory first, if that failed here

    def close(self) -> None:
        """Leave nothing behind; what could not be removed is for the next attempt."""
        with contextlib.suppress(OSError):
            self._path.rmdir()
