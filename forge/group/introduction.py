"""How the ranks find rank 0's store: by the one in which torch has them meet, open to everybody.

    rank 0       draws a secret, and publishes whose job this is and where the secret lies
    each other   compares that with its own job, reads the secret, and says which machine it is on
    rank 0       listens, on 127.0.0.1 where all are on its machine, and publishes where

Whoever reaches torch's store can read all of this, and overwrite it. What is not sealed with the
secret is not acted on: where it is garbage, or another job's, the attempt fails and is restarted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forge.compat import of_torch
from forge.errors import RankLost
from forge.group import secret
from forge.group.secret import Secret
from forge.group.store import LOOPBACK, machine
from forge.process import sections
from forge.process.progress import Section

_PAUSE_S = 0.05
"""Seconds at most between two looks; the first ones follow at once."""
_PAUSE_SHARE = 0.1

_REFUSED = b"refused"
"""Instead of its machine: this rank has another job, or does not see what rank 0 has written."""

_made = itertools.count()
"""How often this process has been one of several ranks: as often as the others have."""


class Found(NamedTuple):
    """Where the ranks agree."""

    secret: Secret
    address: str
    """Of rank 0, as it is reached from here."""
    ports: list[int]
    """What rank 0's `listen` has returned."""


class Introduction:
    """One of all ranks, which are introduced once.

    Args:
        rank: This process's number.
        size: How many there are.
        timeout_s: Seconds that they may come after each other.
        folder: Where rank 0, which alone calls it, leaves the secret: the job's `.forge`. None:
            there is no secret, since nothing is acted on.
    """

    def __init__(
        self, rank: int, size: int, timeout_s: float, folder: Callable[[], Path] | None
    ) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._folder = folder
        self._meeting = of_torch.default_store()
        self._key = f"forge/ranks/{next(_made)}"

    def make(self, listen: Callable[[Secret, bool], list[int]]) -> Found:
        """Find rank 0, or be it.

        Args:
            listen: Called on rank 0, with whether all are on its machine; returns the ports.
        Raises:
            RankLost: Where a rank does not come, or somebody else has written.
            ForgeError: What `folder` raises, on rank 0.
            OSError: Where rank 0 cannot write the secret.
        """
        with sections.current().inside(Section.collective):
            return self._be_first(listen) if self._rank == 0 else self._find()

    def _be_first(self, listen: Callable[[Secret, bool], list[int]]) -> Found:
        own, folder = Secret(), None
        try:
            if self._folder is not None:
                folder = self._folder()
                own = secret.draw(folder)
        except BaseException:
            self._meeting.set(self._key, "{}")  # the others need not wait
            raise
        try:
            told = [os.getpid(), socket.gethostname(), str(folder or ""), own.attempt]
            self._meeting.set(self._key, json.dumps({"job": whose(), "at": told}))
            others = [f"{self._key}/{rank}" for rank in range(1, self._size)]
            self._wait(others)
            machines = {machine()}
            for rank, key in enumerate(others, start=1):
                message = self._meeting.get(key)
                if message == _REFUSED:
                    raise RankLost(
                        f"Rank {rank} of {self._size} does not join this job in {folder}: its own"
                        " output says why"
                    )
                machines.add(own.unseal(key, message).decode())
        finally:
            if folder is not None:
                secret.remove(folder, own)
        address = os.environ.get("MASTER_ADDR") or socket.gethostname()
        ports = listen(own, len(machines) == 1)
        place = json.dumps([machine(), address, *ports]).encode()
        self._meeting.set(self._place, own.seal(self._place, place))
        return Found(own, LOOPBACK, ports)

    def _find(self) -> Found:
        key = f"{self._key}/{self._rank}"
        self._wait([self._key])
        try:
            folder, attempt = self._told(self._meeting.get(self._key))
            own = secret.read(Path(folder), attempt) if self._folder is not None else Secret()
        except RankLost:
            self._meeting.set(key, _REFUSED)
            raise
        self._meeting.set(key, own.seal(key, machine().encode()))
        self._wait([self._place])
        there, address, *ports = json.loads(own.unseal(self._place, self._meeting.get(self._place)))
        return Found(own, LOOPBACK if there == machine() else address, ports)

    @property
    def _place(self) -> str:
        return f"{self._key}/place"

    def _told(self, text: bytes) -> tuple[str, str]:
        """What rank 0 has published, if it is of this job: the folder, and the attempt."""
        try:
            told = json.loads(text)
            if told == {}:
                raise RankLost("Rank 0 has not entered this forge.Run: its own output says why")
            pid, host, folder, attempt = map(str, told["at"])
            theirs = {str(name): str(value) for name, value in told["job"].items()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RankLost(
                f"{self._key!r} in the store in which the ranks have met is not what rank 0 writes:"
                " somebody else has"
            ) from error
        for name, value in whose().items():
            if theirs.get(name, value) != value:
                raise RankLost(
                    f"This rank, {self._rank} of {self._size}, has met the rank 0 of another job:"
                    f" {name} is {theirs[name]!r} there and {value!r} here. That is process {pid!r}"
                    f" on {host!r}, in {folder!r}. Two jobs have met at one address (MASTER_ADDR,"
                    " MASTER_PORT): give each a port of its own"
                )
        return folder, attempt

    def _wait(self, keys: list[str]) -> None:
        """Until all of them are there; torch warns of each wait that ends without an answer."""
        began = time.monotonic()
        while not self._meeting.check(keys):
            waited_s = time.monotonic() - began
            if waited_s >= self._timeout_s:
                raise RankLost(self._missing(keys))
            time.sleep(min(max(0.001, _PAUSE_SHARE * waited_s), _PAUSE_S))

    def _missing(self, keys: list[str]) -> str:
        gone = [key.rpartition("/")[2] for key in keys if not self._meeting.check([key])]
        return (
            f"Rank {'0' if self._rank else ', '.join(gone)} of {self._size} has not come to this"
            f" forge.Run within {self._timeout_s:g} s, and this is rank {self._rank}: every rank"
            " has to enter it."
        )


def whose() -> dict[str, str]:
    """What is the same for all ranks of a job, and another for other jobs, as far as is known."""
    token = os.environ.get("FORGE_JOB_TOKEN")
    found = {
        "user id": str(os.geteuid()),
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID"),
        "FORGE_JOB_TOKEN (its hash)": token and hashlib.sha256(token.encode()).hexdigest()[:16],
    }
    return {name: value for name, value in found.items() if value}
