"""The claim on a directory: only one job writes to it, by its newest attempt.

A lock, released when the process ends, keeps other jobs out. A fencing token in the directory,
checked before every commit, stops a zombie: an older attempt on a node that lost its network,
whose lock the file system has released.

The lock is two files, each covering a case that the other does not:

    `.lock`        POSIX (`fcntl.lockf`): forked children do not inherit it. It is lost when this
                   process closes any descriptor of the file, for example after copying the
                   directory or hashing its files; the next check takes it again.
    `.lock.kept`   `flock`: held until its own descriptor is closed. Children that Python forks
                   close theirs immediately: an orphaned child does not keep the lock.

There are two files because NFS maps both kinds to the same lock and would refuse the second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from forge import messages
from forge.errors import DirectoryInUse
from forge.filesystem.files import open_file, read_plain, write_atomically
from forge.filesystem.locks import is_in_place, release_lock

TOKEN_FILE = ".fence.json"
LOCK_FILE = ".lock"
KEPT_FILE = ".lock.kept"

_ARRAY = (
    " Tasks of a job array that start in the same second have the same directory, if its name is"
    " the time. Give each its own:"
    " 'hydra.run.dir=runs/${oc.env:SLURM_ARRAY_JOB_ID}_${oc.env:SLURM_ARRAY_TASK_ID}'"
)
_claimed_here: set[Path] = set()
"""Directories this process has claimed: POSIX locks do not exclude two Runs of one process."""

_open_here: set[Locks] = set()


class Fence:
    """The right to commit to one directory."""

    def __init__(self, directory: Path) -> None:
        """Claim `directory`, which must exist.

        Raises:
            DirectoryInUse: If a running job uses it.
        """
        self._directory = directory.resolve()
        self._locks = Locks(self._directory)
        job_id = os.environ.get("SLURM_JOB_ID", "")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._token: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            "job_id": job_id,
            "restart_count": restarts,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claimed": time.time(),
        }
        if self._directory in _claimed_here:
            raise DirectoryInUse(self._in_use(self._token))
        previous = self._read()
        try:
            refused = self._locks.take()
            is_left = refused == KEPT_FILE and self._has_died(previous)
            if refused and not is_left and not self._supersedes(previous):
                raise DirectoryInUse(self._in_use(previous))
            self._write_token()
        except BaseException:
            self.release()
            raise
        _claimed_here.add(self._directory)

    def _supersedes(self, previous: dict[str, Any]) -> bool:
        """Whether the lock belongs to an older attempt of this same Slurm job: a zombie."""
        mine = self._token
        is_newer = bool(mine["job_id"]) and (
            previous.get("job_id") == mine["job_id"]
            and previous.get("restart_count", 0) < mine["restart_count"]
        )
        if is_newer:
            messages.warn(
                f"{self._directory}: an older attempt of this job still has the directory locked"
                f" (pid {previous.get('pid')} on {previous.get('host')}). This attempt takes over;"
                " the older one can no longer save here."
            )
        return is_newer

    def _has_died(self, previous: dict[str, Any]) -> bool:
        """Whether the owner is dead, so that only an orphaned child can still have its lock."""
        if previous.get("host") != self._token["host"]:
            return False
        try:
            os.kill(previous["pid"], 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # another user's process, or not a process id
            return False
        return False

    def _in_use(self, holder: dict[str, Any]) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("claimed", 0)))
        return (
            f"{self._directory} is in use by a running job: pid {holder.get('pid', 'unknown')} on"
            f" {holder.get('host', 'unknown')}, since {since}. Wait until that job ends, or stop"
            " it; or choose another `hydra.run.dir` or `resilience.checkpoint.dir`."
            + (_ARRAY if "SLURM_ARRAY_TASK_ID" in os.environ else "")
        )

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(read_plain(self._directory / TOKEN_FILE))
        except (FileNotFoundError, ValueError):
            return {}
        is_ours = isinstance(content, dict) and all(
            type(content.get(key)) is type(value) for key, value in self._token.items()
        )
        return content if is_ours else {}

    @property
    def name(self) -> str:
        """A name that is unique to this claim, on any host."""
        token = self._token
        return f"{token['job_id']}_{token['restart_count']}_{token['token']}"

    def is_older_than(self, name: str) -> bool:
        """Whether `name` is the claim of a later attempt of this same Slurm job."""
        job_id, restarts, _ = name.rsplit("_", 2) if name.count("_") > 1 else ("", "", "")
        is_same_job = bool(job_id) and job_id == self._token["job_id"]
        return is_same_job and restarts.isdecimal() and int(restarts) > self._token["restart_count"]

    def check(self) -> bool:
        """Check the claim; take it back if an older attempt woke up late and claimed it.

        Returns:
            Whether it was taken back.

        Raises:
            DirectoryInUse: If a newer attempt has claimed it.
        """
        if not (self._directory / TOKEN_FILE).exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "the directory was removed or emptied under a running job",
                str(self._directory),
            )
        holder = self._read()
        is_taken: bool = holder.get("token") != self._token["token"]
        if is_taken and not self._supersedes(holder):
            raise DirectoryInUse(
                f"A newer attempt of this job (pid {holder.get('pid')} on {holder.get('host')}) has"
                f" taken over {self._directory}: this attempt, pid {os.getpid()}, stops writing."
            )
        if is_taken:
            self._write_token()
        self._locks.take()  # a lock that was lost; if it fails, the token still protects
        return is_taken

    def _write_token(self) -> None:
        content = json.dumps(self._token, indent=1)
        for is_last_try in (False, False, True):
            try:
                write_atomically(self._directory / TOKEN_FILE, content, is_synced=True)
                return
            except FileNotFoundError:
                # An older attempt that is cleaning up can remove the half-written file.
                if is_last_try or not self._directory.is_dir():
                    raise

    def release(self) -> None:
        """Release the lock; the token stays as a record."""
        _claimed_here.discard(self._directory)
        self._locks.release()


class Locks:
    """The two locks of one directory; `take` opens their files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}
        self._has_warned = False

    def take(self) -> str | None:
        """Take both locks, or take a lost one again; without locks only the token protects.

        This reopens lock files that were replaced: the directory can have been restored from a
        copy.

        Returns:
            The file that another process has locked, or None.
        """
        _open_here.add(self)
        for name in (LOCK_FILE, KEPT_FILE):  # a fixed order, so that one of two starters gets both
            path = self._directory / name
            if name in self._fds and not is_in_place(self._fds[name], path):
                os.close(self._fds.pop(name))
            if name not in self._fds:
                self._fds[name] = open_file(path, os.O_RDWR | os.O_CREAT)
            lock = fcntl.lockf if name == LOCK_FILE else fcntl.flock
            try:
                lock(self._fds[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return name
            except OSError as error:
                self._warn(error)
        return None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            messages.warn(
                f"{self._directory}: the file system does not support file locks"
                f" ({error.strerror}). If two jobs start in this directory at the same time, forge"
                " notices only at the next save; and retention can remove a checkpoint while"
                " another process reads it."
            )

    def release(self) -> None:
        """Release both locks."""
        kept = self._fds.pop(KEPT_FILE, None)
        if kept is not None:  # unlock explicitly: children that C code forked share the descriptor
            with contextlib.suppress(OSError):
                release_lock(kept)
        self.close()

    def close(self) -> None:
        """Close the files; another process that has them open keeps the lock."""
        _open_here.discard(self)
        while self._fds:
            _, fd = self._fds.popitem()
            with contextlib.suppress(OSError):  # the descriptor was closed, so the lock is gone
                os.close(fd)


def _close_in_child() -> None:
    for locks in list(_open_here):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
