"""Who other than this user could have written a file: another owner, or somebody with the right to.

One rule for what is executed (`forge/filesystem/files.py`, which refuses) and for what is trained
on (`forge/checkpoint/ownership/trust.py`, where the policy says what follows). See
docs/decisions/0012-trust.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

_ACL = "system.posix_acl_access"
_ENTRY = struct.Struct("<HHI")  # tag, permissions, number of a user or group
_NAMED_USER, _NAMED_GROUP, _WRITE = 0x02, 0x08, 0x02


def foreign(path: Path) -> str | None:
    """Who other than us and root could have written `path`, in words; None: nobody.

    Of a link, what it points to is asked as well.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        link, status = os.lstat(path), os.stat(path)
    except OSError:
        return None  # gone, or a link to nothing: whoever opens it says so
    if stat.S_ISLNK(link.st_mode) and not is_ours(link.st_uid, path.parent):
        return _belongs(link)
    folder = path if stat.S_ISDIR(status.st_mode) else path.parent
    return _foreign(status, path, folder)


def foreign_file(fd: int, folder: Path) -> str | None:
    """The same of what is open, so that nobody can exchange it after the question.

    Args:
        folder: Where it lies; where it is a directory, itself.
    """
    return _foreign(os.fstat(fd), fd, folder) if hasattr(os, "geteuid") else None


def _foreign(status: os.stat_result, target: Path | int, folder: Path) -> str | None:
    """A directory with the sticky bit lets others add, but not replace: what they add is theirs."""
    if not is_ours(status.st_uid, folder):
        return _belongs(status)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return None
    owner = f"it belongs to {_user(status.st_uid)}, mode {mode:04o}"
    if mode & stat.S_IWOTH:
        return f"can be written by everybody ({owner})"
    if not mode & stat.S_IWGRP:  # with an ACL this bit is its mask: nobody it names can write
        return None
    for name in _named_writers(target):
        return f"can be written by {name}, whom its ACL names ({owner})"
    if not _is_private(status.st_gid, os.geteuid()):
        return f"can be written by the group {_group(status.st_gid)} ({owner})"
    return None


def _belongs(status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())} (mode {mode:04o})"


def is_ours(uid: int, folder: Path) -> bool:
    """Whether a file of this owner in `folder` is ours or root's.

    Some network disks give every file to one user, whoever writes it: what we write there says.
    """
    if uid in (os.geteuid(), 0):
        return True
    probe = folder / f".owner-{secrets.token_hex(8)}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_uid == uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(probe)


def _named_writers(target: Path | int) -> Iterator[str]:
    """Users and groups that an ACL names, other than us and root, and lets write."""
    try:
        raw = os.getxattr(target, _ACL)
    except (OSError, AttributeError):  # none, or a system without them
        return
    for tag, permissions, number in _ENTRY.iter_unpack(raw[4:]):
        if not permissions & _WRITE:
            continue
        if tag == _NAMED_USER and number not in (os.geteuid(), 0):
            yield _user(number)
        if tag == _NAMED_GROUP and not _is_private(number, os.geteuid()):
            yield f"the group {_group(number)}"


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
