"""The secret of one attempt's ranks, which tells their messages from those of anybody else.

Whoever reaches the port of rank 0's store can read it and write to it: the store asks nobody who
they are, and lists its keys. So each message carries a code (an HMAC) over the attempt, the key it
is stored under and its content. Only who knows the secret can compute the code, and a message is no
other one's, and no other attempt's. The secret is in a file of the job's `.forge` that its owner
alone can read, from before the ranks meet until all of them have read it.
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
"""Seconds until a file of rank 0's is seen on the other nodes: file systems of the network cache
what a directory holds."""
_LOOK_S = 0.05
_STALE_S = 3600.0
"""From this age on a file is of an attempt that was killed: no start takes so long."""


class Secret:
    """What the ranks of one attempt know, and nobody else.

    Args:
        attempt: Its name, which may be known.
        key: Empty where nothing is acted on, as in `forge doctor`.
    """

    def __init__(self, attempt: str = "", key: bytes = b"") -> None:
        self.attempt = attempt
        self._key = key

    def code(self, slot: str, content: bytes = b"") -> bytes:
        """What a rank adds to a message under this key of the store."""
        head = f"{self.attempt} {len(slot)} {slot} ".encode()
        return hmac.digest(self._key, head + content, "sha256")

    def code_of(self, rank: int) -> bytes:
        """What a rank says as it connects to rank 0."""
        return self.code(f"rank/{rank}")

    def seal(self, slot: str, content: bytes) -> bytes:
        """The message."""
        return self.code(slot, content) + content

    def unseal(self, slot: str, message: bytes) -> bytes:
        """The content of a message.

        Raises:
            RankLost: If no rank of this attempt has written it.
        """
        code, content = message[:_CODE_BYTES], message[_CODE_BYTES:]
        if not hmac.compare_digest(code, self.code(slot, content)):
            raise RankLost(
                f"Someone other than the ranks of this job wrote {slot!r} into the store in which"
                " they agree: another user of this machine, or of its network, has reached its"
                " port. It is not acted on, and the ranks can no longer agree"
            )
        return content


def draw(folder: Path) -> Secret:
    """A new one, in a file in `folder`, which is the job's `.forge`.

    Raises:
        OSError: Where it cannot be written.
    """
    found = Secret(secrets.token_hex(16), secrets.token_bytes(_NUM_BYTES))
    make_directory(folder)
    path = _path(folder, found.attempt)
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        write_all(fd, found._key)
        if os.fstat(fd).st_mode & 0o044:
            messages.warn(
                f"{folder}: the file system keeps no permissions. Others can read the secret of"
                " this job's ranks there, and could end the job"
            )
    except BaseException:
        remove(folder, found)
        raise
    finally:
        os.close(fd)
    return found


def read(folder: Path, attempt: str) -> Secret:
    """The one that rank 0 has drawn.

    Raises:
        RankLost: If its file is not there in time, or if somebody else could have written it.
    """
    path = _path(folder, attempt)
    if folder.name != FORGE or not _ATTEMPT.fullmatch(attempt):
        raise RankLost(f"Rank 0 would not write the secret of the ranks to {str(path)!r}")
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
                " every node of the job has mounted"
            )
        time.sleep(_LOOK_S)


def remove(folder: Path, own: Secret) -> None:
    """Remove the file: every rank has read it, or will not."""
    with contextlib.suppress(OSError):  # the next claim does
        _path(folder, own.attempt).unlink()


def clear(folder: Path) -> None:
    """Remove the files of attempts that were killed as they began.

    Raises:
        OSError: Where one cannot be removed.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _STALE_S:
                path.unlink()


def _path(folder: Path, attempt: str) -> Path:
    return folder / f"{_PREFIX}{attempt}"
