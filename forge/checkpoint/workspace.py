"""The work directory of an attempt: saves are staged in it, removed checkpoints moved into it.

Every rename of a save or a removal is out of the attempt's own work directory or into it. A newer
attempt renames that directory when it claims: from then on all those renames fail, even if a
zombie checked the token just before. Checking the token alone would leave that gap.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from forge.checkpoint import removal
from forge.checkpoint.fence import TOKEN_FILE, Fence
from forge.checkpoint.removal import Remover
from forge.errors import DirectoryInUse, unwritable
from forge.filesystem import durable

_WORK, _LEFT = ".work_", ".left_"
_LEFTOVERS = (".step_", f"{TOKEN_FILE}.tmp-")
"""Temporary files of a health check, and of a claim."""


def interrupted(directory: Path) -> dict[str, Path]:
    """Checkpoints that an attempt was replacing as it was killed; the next attempt restores them.

    Returns:
        By their visible name, which no checkpoint has now.
    """
    works = (path for path in directory.iterdir() if path.name.startswith((_WORK, _LEFT)))
    found: dict[str, Path] = {}
    for work in works:
        with contextlib.suppress(OSError):  # removed just now, or a file
            found |= removal.replaced_in(work)
    return {name: path for name, path in found.items() if not os.path.lexists(directory / name)}


class Workspace:
    """The work directory of one attempt; it exists only while the attempt writes."""

    def __init__(self, directory: Path) -> None:
        """Claim `directory`, creating it; remove the work directories of older attempts.

        Raises:
            DirectoryInUse: If a running job uses the directory.
            CheckpointError: If it cannot be written; `DiskFull` if there is no room.
        """
        self._directory = directory
        try:
            durable.make_directory(directory)
            self._fence = Fence(directory)
        except OSError as error:
            raise unwritable(f"{directory} cannot be claimed: {error}", error) from error
        self.remover = Remover(directory)
        self._path = directory / f"{_WORK}{self._fence.name}"
        try:
            self._take_over()
        except BaseException as error:
            self._fence.release()
            if isinstance(error, OSError):
                text = f"{directory} cannot be cleaned up: {error}"
                raise unwritable(text, error) from error
            raise

    def _take_over(self) -> None:
        """Take older attempts' work directories away; restore what they were replacing."""
        for path in list(self._directory.iterdir()):
            if path.name.startswith(_WORK) and path != self._path:
                if self._fence.is_older_than(path.name.removeprefix(_WORK)):
                    raise DirectoryInUse(
                        f"a newer attempt of this job has taken over {self._directory} (see"
                        f" {path}), so this attempt ends"
                    )
                if path.is_symlink():  # forge makes no links here, and would write elsewhere
                    self.remover.delete_now(path)
                    continue
                # One rename: after it, the old attempt cannot write there any more.
                left = path.with_name(_LEFT + path.name.removeprefix(_WORK))
                with contextlib.suppress(FileNotFoundError):  # its owner removed it just now
                    os.rename(path, left)
                    self.remover.clear(left)
            elif path.name.startswith(_LEFT):
                self.remover.clear(path)
            elif path.name.startswith(_LEFTOVERS):
                self.remover.delete_now(path)

    @contextlib.contextmanager
    def entered(self) -> Iterator[Path]:
        """Create the work directory for a `with` block.

        Raises:
            DirectoryInUse: If a newer attempt has taken over, before or during the block.
            FileNotFoundError: If the checkpoint directory is gone or was emptied.
        """
        self.check()  # before mkdir: an empty directory can be a bare mount point
        try:
            self._path.mkdir(exist_ok=True)
            if self._path.is_symlink():
                raise OSError(errno.ELOOP, "is a link: remove it", str(self._path))
            try:
                self.check()  # after mkdir: a newer attempt that claims from now on removes it
            except BaseException:
                self._remove()
                raise
            yield self._path
        except FileNotFoundError:
            self.check()
            raise

    @contextlib.contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        """An empty folder in the work directory; what is left of it after the block is removed.

        Raises:
            OSError, DirectoryInUse: Like `entered`.
        """
        with self.entered() as work:
            folder = work / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def check(self) -> None:
        """Raise DirectoryInUse if a newer attempt has claimed the directory."""
        if self._fence.check():
            self._take_over()

    def put_in_place(self, temporary: Path, final: Path) -> None:
        """Rename a staged checkpoint into place and sync the directory.

        An existing checkpoint of that name (damaged, or not complete) is kept in the work
        directory until the new one is synced; if this process dies in between, the next attempt
        restores it. Then it is renamed: it must not be restored after a rollback removes the new.
        """
        if not os.path.lexists(final):
            os.rename(temporary, final)
            durable.sync_directory(self._directory)
            return
        aside = self.remover.aside(final, self._path, "replaced")
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except BaseException:
            os.rename(aside, final)
            raise
        try:
            durable.sync_directory(self._directory)
            with contextlib.suppress(OSError):  # leaving the old name does no harm yet
                aside = self.remover.give_up(aside)
                durable.sync_directory(self._path)
        finally:
            self.remover.delete(aside)  # syncs the directory first, in case that failed here

    def close(self) -> None:
        """Remove the work directory, and release the claim."""
        self.remover.close()
        self._remove()
        self._fence.release()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # the next attempt removes the files that are left
            self._path.rmdir()
