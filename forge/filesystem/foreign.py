"""Whether another user could have written a file, or has replaced a directory of this process.

A user can write a file as its owner, or by its permissions; `forge/filesystem/files.py` refuses to
execute such files. See docs/decisions/0012-trust.md.

A user who can write to the parent of a directory can rename it, and put a link to one of our
private directories in its place. So the claim of a directory records the inode, which is compared
before a file is created below the path. The device number is compared as well for disks; network
and overlay file systems have another one after each mount. The directory stays open, since some
file systems renumber unused inodes. A directory that is missing does not count as replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

_ACL = "system.posix_acl_access"
_given_to: dict[tuple[int, int], int] = {}
"""(our user id, device) -> the owner of a new file of ours."""


def foreign_file(fd: int, folder: Path) -> str | None:
    """Which user other than us and root could have written an open file, in words; None: no other.

    In a sticky directory others can add their own files, but not replace ours.

    Args:
        fd: The file, which cannot be replaced after the check; or a directory.
        folder: The file's directory; for a directory, the directory itself.
    """
    status = os.fstat(fd)
    if not is_ours(status.st_uid, folder):
        return _belongs(status)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return None
    owner = f"it belongs to {_user(status.st_uid)}, mode {mode:04o}"
    if mode & stat.S_IWOTH:
        return f"can be written by everybody ({owner})"
    if not mode & stat.S_IWGRP:  # this is also the mask of its ACL, so the ACL grants no writing
        return None
    if _has_acl(fd):
        return f"can be written by users or groups that its ACL names ({owner})"
    if not _is_private(status.st_gid, os.geteuid()):
        return f"can be written by the group {_group(status.st_gid)} ({owner})"
    return None


def _belongs(status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())} (mode {mode:04o})"


def is_ours(uid: int, folder: Path) -> bool:
    """Whether a file of this owner in `folder` is ours or root's.

    Some network file systems map all files to one user: forge creates a file there to see which
    user, once for each file system.
    """
    euid = os.geteuid()
    if uid in (euid, 0):
        return True
    try:
        disk = euid, os.stat(folder).st_dev
        if disk not in _given_to:
            _given_to[disk] = _owner_of_new_file(folder)
    except OSError:  # not writable: another folder of the file system can show it later
        return False
    return uid == _given_to[disk]


def _owner_of_new_file(folder: Path) -> int:
    probe = folder / f".owner-{secrets.token_hex(8)}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(probe)


def _has_acl(fd: int) -> bool:
    try:
        return bool(os.getxattr(fd, _ACL))
    except (OSError, AttributeError):  # no ACL, or a system without ACLs
        return False


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
    """Whether it is the user's private group, which many systems create for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


_claimed: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
"""Path -> (pid that opened the directory, its descriptor in that process), (device, inode)."""


def note_claim(path: Path) -> None:
    """Record which directory is at `path` now.

    Raises:
        OSError: If there is no directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    forget_claim(path)
    _claimed[str(path)] = (os.getpid(), fd), _identity(os.fstat(fd))


def forget_claim(path: Path) -> None:
    """Drop the record of `path`."""
    opened, _ = _claimed.pop(str(path), (None, None))
    # In a forked child the descriptor number can belong to another file by now.
    if opened is not None and opened[0] == os.getpid():
        os.close(opened[1])


def replaced(path: Path) -> str:
    """Why forge must not create `path`: a claimed parent directory was replaced; else empty."""
    text = str(path)
    for claimed, (_, before) in _claimed.items():
        if text != claimed and not text.startswith(claimed + os.sep):
            continue
        try:
            now = _identity(os.stat(claimed))
        except OSError:  # creating the file will raise
            continue
        if now != before:
            leads = f", a link to {os.path.realpath(claimed)}" if os.path.islink(claimed) else ""
            return (
                f"{claimed} was replaced by another directory while this job was running: its inode"
                f" was {before[1]} and is now {now[1]}{leads}. forge writes nothing there. If you"
                " moved or restored the directory yourself, start the job again; otherwise a user"
                " who can write to its parent directory has replaced it: restore the job's own"
                " directory first"
            )
    return ""


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev if os.major(status.st_dev) else 0, status.st_ino
