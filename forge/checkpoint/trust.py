"""Who else could have written a checkpoint: another owner, or somebody with the right to write.

Reading one executes nothing, whoever wrote it, and allocates no more than its files hold; but
training would go on from weights that others chose. See docs/decisions/0012-trust.md.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from forge import messages
from forge.checkpoint.manifest import Manifest
from forge.checkpoint.names import STATE
from forge.config import OnForeign
from forge.errors import CheckpointError, DamagedCheckpoint

MAX_STATE_BYTES = 1 << 30
"""Bytes of JSON that are read, and written: parsing takes many times as much memory."""


class Trust:
    """What `checkpoint.on_foreign` says, and whether people were told."""

    def __init__(self, action: OnForeign) -> None:
        self._action = action
        self._has_told = False

    def check(self, path: Path) -> None:
        """A directory, or a file, that is not a checkpoint itself.

        Raises:
            CheckpointError: Where others could have written it and the policy says refuse.
        """
        problem = self._problem(path)
        if problem:
            raise CheckpointError(problem)

    def check_step(self, path: Path) -> None:
        """A checkpoint: the link where it is one, its directory and all files in it.

        Raises:
            DamagedCheckpoint: Where others could have written it and the policy says refuse.
        """
        if self._action is OnForeign.ignore:
            return
        try:
            names = sorted(os.listdir(path))
        except OSError:
            return  # reading it says what is wrong
        for one in (path, *(path / name for name in names)):
            problem = self._problem(one)
            if problem:
                raise DamagedCheckpoint(problem)

    def _problem(self, path: Path) -> str | None:
        """Why `path` is refused; a warning, once, where the policy says no more."""
        if self._action is OnForeign.ignore or (self._has_told and not self._refuses):
            return None
        found = foreign(path)
        if not found:
            return None
        text = (
            f"{path} {found}. Whoever can write there decides what is trained on. Take it over"
            f" (`chown -R`, `chmod -R go-w`), or copy it to a directory of your own; or say that"
            " they are trusted: `resilience.checkpoint.on_foreign=ignore`"
        )
        if self._refuses:
            return f"{text} (it is refuse now)."
        self._has_told = True
        messages.warn(f"{text}.")
        return None

    @property
    def directory_mode(self) -> int:
        """Rights of new directories, before the umask: what is refused must not be made."""
        return 0o755 if self._refuses else 0o777

    @property
    def _refuses(self) -> bool:
        return self._action is OnForeign.refuse


def foreign(path: Path) -> str | None:
    """Who other than us and root could have written `path`, in words; None: nobody.

    A directory with the sticky bit lets others add, but not replace: what they add is theirs.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        statuses = [os.lstat(path), os.stat(path)]
    except OSError:
        return None  # gone, or a link to nothing: whoever opens it says so
    me = os.geteuid()
    for status in statuses:
        if status.st_uid not in (me, 0):
            mode = stat.S_IMODE(status.st_mode)
            return f"belongs to {_user(status.st_uid)}, not to {_user(me)} (mode {mode:04o})"
    mode = stat.S_IMODE(statuses[1].st_mode)
    is_sticky = stat.S_ISDIR(statuses[1].st_mode) and bool(mode & stat.S_ISVTX)
    owner = f"it belongs to {_user(statuses[1].st_uid)}, mode {mode:04o}"
    if mode & stat.S_IWOTH and not is_sticky:
        return f"can be written by everybody ({owner})"
    group = statuses[1].st_gid
    if mode & stat.S_IWGRP and not is_sticky and not _is_private(group, me):
        return f"can be written by the group {_group(group)} ({owner})"
    return None


def check_state_size(described: Manifest) -> None:
    """Raise DamagedCheckpoint where the JSON is too large to be parsed."""
    size = described.files[STATE]["size"]
    if size > MAX_STATE_BYTES:
        raise DamagedCheckpoint(
            f"{STATE}: expected at most {MAX_STATE_BYTES} bytes of JSON, found {size}"
        )


def check_writable_size(text: bytes) -> None:
    """Raise CheckpointError where the JSON is larger than what would be read again."""
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"The state without its tensors is {len(text)} bytes of JSON; at most"
            f" {MAX_STATE_BYTES} are kept. Let state_dict() return large lists as tensors."
        )


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    import grp

    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


def _is_private(gid: int, uid: int) -> bool:
    """Whether a group is the user's own, as many systems make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )
