"""The TCPStore by which the ranks of an attempt coordinate; rank 0 hosts it.

Messages are authenticated. If all ranks are on one machine, it listens on 127.0.0.1 only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge import messages
from forge.errors import RankLost
from forge.group.secret import Secret

LOOPBACK = "127.0.0.1"

_BACKLOG = 1024
"""Backlog of connections, since all ranks connect at the same time."""


def host(*, is_local: bool, port: int = 0) -> Any:
    """Host a store in this process, until the returned object is deleted.

    Args:
        is_local: Whether to listen on 127.0.0.1 only.
        port: The port; 0: any free port.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    if not is_local:
        return _store(LOOPBACK, port, **options)
    # By default torch listens on all addresses, whatever host name it gets.
    listener = socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    try:
        return _store(LOOPBACK, port, **options)  # this closes the descriptor
    except NotImplementedError:  # with libuv only since torch 2.8
        return _store(LOOPBACK, port, **options, use_libuv=False)


def connect(address: str, port: int, timeout_s: float) -> Any:
    """Connect to a store that this or another process hosts."""
    timeout = timedelta(seconds=timeout_s)
    return _store(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def timeout(store: Any, keys: list[str], timeout_s: float, where: str) -> RankLost:
    """The error for ranks that have not set their key in time; `keys` has one key per rank."""
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    return RankLost(
        f"Timed out after {timeout_s:g} s waiting for rank {messages.truncate_list(missing, 16)}"
        f" (there are {len(keys)} ranks) {where}"
    )


def machine() -> str:
    """Identifies this network namespace, which has its own 127.0.0.1: a machine or container."""
    found = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            is_link = os.path.islink(path)
            found.append(os.readlink(path) if is_link else Path(path).read_text().strip())
        except OSError:  # not Linux
            continue
    return " ".join(found)


class Connection:
    """A connection to the store that authenticates messages; methods are named as torch's.

    Methods that read raise RankLost if a message was not written by a rank of this attempt.

    Args:
        client: The client of the store.
        secret: The ranks' secret.
        on_forged: Called before RankLost is raised, with its message.
    """

    def __init__(self, client: Any, secret: Secret, on_forged: Callable[[str], None]) -> None:
        self._client = client
        self._secret = secret
        self._on_forged = on_forged
        self.check = client.check
        self.wait = client.wait
        self.set_timeout = client.set_timeout
        self.delete_key = client.delete_key

    def set(self, key: str, content: bytes) -> None:
        """Write, replacing an earlier value."""
        self._client.set(key, self._secret.seal(key, content))

    def get(self, key: str) -> bytes:
        """Wait until the key exists, and read it."""
        return self._unsealed(key, self._client.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several."""
        messages = self._client.multi_get(keys)
        return [self._unsealed(key, one) for key, one in zip(keys, messages, strict=True)]

    def compare_set(self, key: str, expected: str, content: bytes) -> bytes:
        """Write if the key does not exist (`expected` is empty); return its value now."""
        found = self._client.compare_set(key, expected, self._secret.seal(key, content))
        return self._unsealed(key, found)

    def _unsealed(self, key: str, message: bytes) -> bytes:
        try:
            return self._secret.unseal(key, message)
        except RankLost as error:
            self._on_forged(str(error))
            raise


def _store(*args: Any, **options: Any) -> Any:
    """A TCPStore, accessed by name since torch can be built without it."""
    return vars(dist)["TCPStore"](*args, **options)
