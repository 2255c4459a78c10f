"""How the ranks find forge's store on rank 0: through torch's rendezvous store.

    rank 0       creates a secret, and publishes which job this is and the path of the secret
    each other   compares the job with its own, reads the secret, and publishes its machine
    rank 0       listens (on 127.0.0.1 if all ranks are on its machine) and publishes address, ports

Any process that reaches torch's store can read and overwrite these entries. Entries that are not
authenticated with the secret are not used: if one is garbage or another job's, the attempt fails
and is restarted.
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
from forge.process.progress import Phase

_PAUSE_S = 0.05
"""Longest pause in seconds between two polls; the first polls are faster."""
_PAUSE_SHARE = 0.1

_REFUSED = b"refused"
"""Published instead of the machine: this rank belongs to another job or cannot read the secret."""

_made = itertools.count()
"""Number of introductions in this process; the same on all ranks."""


class Found(NamedTuple):
    """How to reach forge's store on rank 0."""

    secret: Secret
    address: str
    """Address of rank 0 as seen from this rank."""
    ports: list[int]
    """The ports that rank 0's `listen` returned."""


class Introduction:
    """Introduces all ranks to each other, once.

    Args:
        rank: This process's rank.
        size: The number of ranks.
        timeout_s: Timeout in seconds for all ranks to arrive.
        folder: Called on rank 0; returns the folder for the secret, the job's `.forge`. None:
            there is no secret, since the ranks do not act on each other's messages.
    """

    def __init__(
        self, rank: int, size: int, timeout_s: float, folder: Callable[[], Path] | None
    ) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._folder = folder
        self._meeting = of_torch.default_store()
        self._key = f"forge/ranks/{next(_made)}"

    def make(self, listen: Callable[[Secret, bool], list[int]]) -> Found:
        """Find rank 0; on rank 0, wait for the others.

        Args:
            listen: Called on rank 0, with whether all are on its machine; returns the ports.
        Raises:
            RankLost: If a rank does not arrive, or another process wrote to the store.
            ForgeError: From `folder`, on rank 0.
            OSError: If rank 0 cannot write the secret.
        """
        with sections.current().inside(Phase.collective):
            return self._be_first(listen) if self._rank == 0 else self._find()

    def _be_first(self, listen: Callable[[Secret, bool], list[int]]) -> Found:
        own, folder = Secret(), None
        try:
            if self._folder is not None:
                folder = self._folder()
                own = secret.draw(folder)
        except BaseException:
            self._meeting.set(self._key, "{}")  # tells the others not to wait
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
                        f"Rank {rank} of {self._size} refused to join this job in {folder}: see the"
                        f" output of rank {rank} for the reason"
                    )
                machines.add(own.unseal(key, message).decode())
        finally:
            if folder is not None:
                secret.remove(folder, own)
        address = os.environ.get("MASTER_ADDR") or socket.gethostname()
        ports = listen(own, len(machines) == 1)
        address_and_ports = json.dumps([machine(), address, *ports]).encode()
        self._meeting.set(self._address_key, own.seal(self._address_key, address_and_ports))
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
        self._wait([self._address_key])
        there, address, *ports = json.loads(
            own.unseal(self._address_key, self._meeting.get(self._address_key))
        )
        return Found(own, LOOPBACK if there == machine() else address, ports)

    @property
    def _address_key(self) -> str:
        return f"{self._key}/place"

    def _told(self, text: bytes) -> tuple[str, str]:
        """Parse rank 0's entry, check that it is of this job; returns (folder, attempt)."""
        try:
            told = json.loads(text)
            if told == {}:
                raise RankLost(
                    "Rank 0 failed before it entered this forge.Run: see the output of rank 0 for"
                    " the reason"
                )
            pid, host, folder, attempt = map(str, told["at"])
            theirs = {str(name): str(value) for name, value in told["job"].items()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RankLost(
                f"The entry {self._key!r} in the rendezvous store was not written by rank 0:"
                " another process has overwritten it"
            ) from error
        for name, value in whose().items():
            if theirs.get(name, value) != value:
                raise RankLost(
                    f"This rank, {self._rank} of {self._size}, has connected to rank 0 of another"
                    f" job: {name} is {theirs[name]!r} there and {value!r} here. The other rank 0"
                    f" is process {pid!r} on {host!r}, in {folder!r}. Two jobs use the same address"
                    " (MASTER_ADDR, MASTER_PORT): give each job its own port"
                )
        return folder, attempt

    def _wait(self, keys: list[str]) -> None:
        """Poll until all keys exist: torch's own wait logs a warning whenever it times out."""
        began = time.monotonic()
        while not self._meeting.check(keys):
            waited_s = time.monotonic() - began
            if waited_s >= self._timeout_s:
                raise RankLost(self._missing(keys))
            time.sleep(min(max(0.001, _PAUSE_SHARE * waited_s), _PAUSE_S))

    def _missing(self, keys: list[str]) -> str:
        gone = [key.rpartition("/")[2] for key in keys if not self._meeting.check([key])]
        return (
            f"Timed out after {self._timeout_s:g} s: rank {self._rank} waited for rank"
            f" {'0' if self._rank else ', '.join(gone)} of {self._size} to enter this forge.Run."
            " Every rank has to enter it."
        )


def whose() -> dict[str, str]:
    """Facts that are equal on all ranks of a job, and differ between jobs, as far as known."""
    token = os.environ.get("FORGE_JOB_TOKEN")
    found = {
        "user id": str(os.geteuid()),
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID"),
        "FORGE_JOB_TOKEN (its hash)": token and hashlib.sha256(token.encode()).hexdigest()[:16],
    }
    return {name: value for name, value in found.items() if value}
