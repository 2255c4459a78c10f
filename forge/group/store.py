"""The store in which the ranks of an attempt agree: rank 0 hosts it, and only its ranks are heard.

All ranks on one machine reach it at 127.0.0.1, and nobody from elsewhere does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge.errors import RankLost
from forge.group.secret import Secret

LOOPBACK = "127.0.0.1"

_BACKLOG = 1024
"""Connections that wait to be accepted: of all ranks at once."""


def host(*, is_local: bool, port: int = 0) -> Any:
    """A store that this process hosts, until it is dropped.

    Args:
        is_local: Whether to listen on 127.0.0.1 alone.
        port: 0: any.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    if not is_local:
        return _store(LOOPBACK, port, **options)
    # torch by itself would listen on all addresses, whatever name it is given.
    listener = socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    try:
        return _store(LOOPBACK, port, **options)  # which closes the descriptor
    except NotImplementedError:  # by libuv it can since 2.8
        return _store(LOOPBACK, port, **options, use_libuv=False)


def connect(address: str, port: int, timeout_s: float) -> Any:
    """A connection to a store that another process, or this one, hosts."""
    timeout = timedelta(seconds=timeout_s)
    return _store(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def machine() -> str:
    """Names what has an address 127.0.0.1 of its own: this machine, or a container on it."""
    found = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            is_link = os.path.islink(path)
            found.append(os.readlink(path) if is_link else Path(path).read_text().strip())
        except OSError:  # not Linux
            continue
    return " ".join(found)


class Connection:
    """A connection whose messages the secret seals, by the names of torch's own methods.

    Those that read raise RankLost where somebody else has written.

    Args:
        client: Of the store.
        secret: Of the ranks.
        on_forged: Called before that, with what is wrong.
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
        """Write; what was there before is gone."""
        self._client.set(key, self._secret.seal(key, content))

    def get(self, key: str) -> bytes:
        """Read, once somebody has written."""
        return self._unsealed(key, self._client.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several."""
        messages = self._client.multi_get(keys)
        return [self._unsealed(key, one) for key, one in zip(keys, messages, strict=True)]

    def compare_set(self, key: str, expected: str, content: bytes) -> bytes:
        """Write where nobody has written yet (`expected` is empty); what is there now."""
        found = self._client.compare_set(key, expected, self._secret.seal(key, content))
        return self._unsealed(key, found)

    def _unsealed(self, key: str, message: bytes) -> bytes:
        try:
            return self._secret.unseal(key, message)
        except RankLost as error:
            self._on_forged(str(error))
            raise


def _store(*args: Any, **options: Any) -> Any:
    """A TCPStore; torch may be built without."""
    return vars(dist)["TCPStore"](*args, **options)
