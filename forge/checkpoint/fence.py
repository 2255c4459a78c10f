"""Who may write to a checkpoint directory: one live job, and of one job its newest attempt.

Two things hold that. A lock (POSIX, so that it ends with the process and is not inherited by
DataLoader workers) keeps a second job out. A token in the directory, checked before every commit,
keeps out a zombie: an older attempt on a node that was cut off, whose lock the file system may
have given away.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from forge import messages
from forge.checkpoint import durable
from forge.errors import DirectoryInUse

TOKEN_FILE = ".fence.json"
LOCK_FILE = ".lock"

_claimed_here: set[Path] = set()
"""POSIX locks do not keep two Runs of one process apart; this does."""


class Fence:
    """The right to commit to one directory."""

    def __init__(self, directory: Path) -> None:
        """Claim `directory`, which exists.

        Raises:
            DirectoryInUse: Where a live job holds it.
        """
        self._directory = directory.resolve()
        self._lock_fd = -1
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
            if not self._take_lock() and not self._supersedes(previous):
                raise DirectoryInUse(self._in_use(previous))
            self._write_token()
        except BaseException:
            self.release()
            raise
        _claimed_here.add(self._directory)

    def _take_lock(self) -> bool:
        if sys.platform == "win32":
            return True
        import fcntl

        before = self._lock_fd
        self._lock_fd = os.open(
            self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        if before >= 0:  # closed first: should it be the same file, that would end the new lock
            os.close(before)
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            # A file system without locks: the token alone has to do.
            messages.warn(
                f"{self._directory}: the file system keeps no locks ({error.strerror}). Two jobs"
                " started in this directory at the same time would not notice at once."
            )
        return True

    def _supersedes(self, previous: dict[str, Any]) -> bool:
        """Whether the holder is an older attempt of this very Slurm job: a zombie."""
        mine = self._token
        is_newer = bool(mine["job_id"]) and (
            previous.get("job_id") == mine["job_id"]
            and previous.get("restart_count", 0) < mine["restart_count"]
        )
        if is_newer:
            messages.warn(
                f"{self._directory}: an older attempt of this job still holds the directory"
                f" (pid {previous.get('pid')} on {previous.get('host')}); it can commit no more."
            )
        return is_newer

    def _in_use(self, holder: dict[str, Any]) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("claimed", 0)))
        return (
            f"{self._directory} belongs to a running job: pid {holder.get('pid', 'unknown')} on"
            f" {holder.get('host', 'unknown')}, since {since}. Wait for it or stop it; or choose"
            " another `hydra.run.dir` or `resilience.checkpoint.dir`."
        )

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads((self._directory / TOKEN_FILE).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        is_ours = isinstance(content, dict) and all(
            type(content.get(key)) is type(value) for key, value in self._token.items()
        )
        return content if is_ours else {}

    @property
    def name(self) -> str:
        """A name that no other claim has, on whatever host and with whatever pid."""
        token = self._token
        return f"{token['job_id']}_{token['restart_count']}_{token['token']}"

    def is_older_than(self, name: str) -> bool:
        """Whether `name` is that of a later attempt of this very Slurm job."""
        job_id, restarts, _ = name.rsplit("_", 2) if name.count("_") > 1 else ("", "", "")
        is_same_job = bool(job_id) and job_id == self._token["job_id"]
        return is_same_job and restarts.isdecimal() and int(restarts) > self._token["restart_count"]

    def check(self) -> bool:
        """Whether an older attempt, which woke up late, had claimed the directory: no more.

        Raises:
            DirectoryInUse: Where a newer attempt has claimed it.
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
                f"{self._directory} was claimed by a newer attempt (pid {holder.get('pid')} on"
                f" {holder.get('host')}): this one, pid {os.getpid()}, must not write any more."
            )
        if is_taken:
            self._write_token()
        if not self._has_lock_file():
            self._lock_again()
        return is_taken

    def _write_token(self) -> None:
        content = json.dumps(self._token, indent=1).encode()
        for is_last_try in (False, False, True):
            try:
                durable.replace_file(self._directory / TOKEN_FILE, content)
                return
            except FileNotFoundError:
                # An older attempt that cleans up takes the half-written file for a leftover.
                if is_last_try or not self._directory.is_dir():
                    raise

    def _has_lock_file(self) -> bool:
        """Whether the file that is locked is the one that others would find."""
        if self._lock_fd < 0:
            return True
        try:
            found = os.stat(self._directory / LOCK_FILE)
            return os.path.samestat(found, os.fstat(self._lock_fd))
        except FileNotFoundError:
            return False

    def _lock_again(self) -> None:
        """The directory is another one with our token: put back from a copy, or mounted anew."""
        if not self._take_lock():
            raise DirectoryInUse(self._in_use(self._read()))
        holder = self._read()
        if holder.get("token") != self._token["token"]:
            raise DirectoryInUse(self._in_use(holder))
        messages.warn(f"{self._directory} was replaced under a running job: it is locked anew.")

    def release(self) -> None:
        """Let go of the lock; the token stays as a record."""
        _claimed_here.discard(self._directory)
        if self._lock_fd >= 0:
            fd, self._lock_fd = self._lock_fd, -1
            with contextlib.suppress(OSError):  # the descriptor, and the lock with it, is gone
                os.close(fd)
