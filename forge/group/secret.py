"""The secret with which the ranks of an attempt authenticate their messages.

The store on rank 0 has no access control: any process that reaches its port can read and write it.
So each message has an HMAC over the attempt, the message's key in the store and its content. Only
processes that know the secret can compute it, and a message cannot be replayed under another key or
in another attempt. The secret is a file in the job's `.forge` that only its owner can read; rank 0
writes it before the rendezvous and removes it once all ranks have read it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

from forge import messages
from forge.errors import RankLost, Untrusted
from forge.filesystem.files import FORGE, make_directory, open_file, read_trusted, write_all

_PREFIX = "ranks."
"""`<job dir>/.forge/ranks.<attempt>`."""
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
_NUM_BYTES = 32
_CODE_BYTES = 32
_SHARED_S = 60.0
"""Timeout in seconds until other nodes see rank 0's file: network file systems cache listings."""
_LOOK_S = 0.05
_STALE_S = 3600.0
"""A file of this age in seconds is left from a killed attempt: no start takes so long."""


class Secret:
    """The secret of one attempt's ranks.

    Args:
        attempt: The attempt's name, which is not secret.
        key: Empty if messages are not acted on, as in `forge doctor`.
    """

    def __init__(self, attempt: str = "", key: bytes = b"") -> None:
        self.attempt = attempt
        self._key = key

    def code(self, slot: str, content: bytes = b"") -> bytes:
        """The HMAC of a message under this key of the store."""
        head = f"{self.attempt} {len(slot)} {slot} ".encode()
        return hmac.digest(self._key, head + content, "sha256")

    def code_of(self, rank: int) -> bytes:
        """The code with which a rank connects to rank 0."""
        return self.code(f"rank/{rank}")

    def seal(self, slot: str, content: bytes) -> bytes:
        """A message: HMAC and content."""
        return self.code(slot, content) + content

    def unseal(self, slot: str, message: bytes) -> bytes:
        """Verify a message and return its content.

        Raises:
            RankLost: If it was not written by a rank of this attempt.
        """
        code, content = message[:_CODE_BYTES], message[_CODE_BYTES:]
        if not hmac.compare_digest(code, self.code(slot, content)):
            raise RankLost(
                f"The entry {slot!r} in the store of this job's ranks was not written by one of"
                " them: another process on this machine or network has connected to the store's"
                " port. forge ignores the entry and ends this attempt"
            )
        return content


def draw(folder: Path) -> Secret:
    """Create a secret and write it to `folder`, the job's `.forge`.

    Raises:
        OSError: If it cannot be written.
    """
    found = Secret(secrets.token_hex(16), secrets.token_bytes(_NUM_BYTES))
    make_directory(folder)
    path = _path(folder, found.attempt)
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        write_all(fd, found._key)
        if os.fstat(fd).st_mode & 0o044:
            messages.warn(
                f"{folder}: the file system does not support file permissions. Other users can"
                " read the secret of this job's ranks there, and could end the job with it. To"
                " prevent this, put the job's directory on another file system (`hydra.run.dir`,"
                " `hydra.sweep.dir`)"
            )
    except BaseException:
        remove(folder, found)
        raise
    finally:
        os.close(fd)
    return found


def read(folder: Path, attempt: str) -> Secret:
    """Read the secret that rank 0 has written.

    Raises:
        RankLost: If the file does not appear in time, or another user could have written it.
    """
    path = _path(folder, attempt)
    if folder.name != FORGE or not _ATTEMPT.fullmatch(attempt):
        raise RankLost(
            f"The path of the ranks' secret is {str(path)!r}, which is not in a job's {FORGE}"
            " folder: another process has written to the rendezvous store"
        )
    deadline = time.monotonic() + _SHARED_S
    while True:
        try:
            key = read_trusted(path)
            if len(key) == _NUM_BYTES:
                return Secret(attempt, key)
            problem = f"has {len(key)} bytes, expected {_NUM_BYTES}"
        except Untrusted as error:
            raise RankLost(str(error)) from error
        except OSError as error:
            problem = str(error)
        if time.monotonic() >= deadline:
            raise RankLost(
                f"{path}, which rank 0 has written, could not be read here within"
                f" {_SHARED_S:g} s: {problem}. The job's directory has to be on a file system that"
                " is shared by all nodes of the job"
            )
        time.sleep(_LOOK_S)


def remove(folder: Path, own: Secret) -> None:
    """Remove the file: every rank has read it, or the start has failed."""
    with contextlib.suppress(OSError):  # `clear` removes it later
        _path(folder, own.attempt).unlink()


def clear(folder: Path) -> None:
    """Remove the files of attempts that were killed during their start.

    Raises:
        OSError: If one cannot be removed.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _STALE_S:
                path.unlink()


def _path(folder: Path, attempt: str) -> Path:
    return folder / f"{_PREFIX}{attempt}"
