"""Whether the other ranks live: each holds a connection to rank 0, and the kernel closes it.

    rank r    connects to rank 0, says once who it is, and then nothing until it leaves
    rank 0    sees the end of a connection, and tells the others whose it was

A process that ends, however it ends, closes its connections; one that is stopped, or busy for half
an hour, does not. While all live nothing is sent; for a machine that is gone the kernels ask each
other. A thread sleeps until there is something to read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable

from forge.errors import RankLost
from forge.group.store import LOOPBACK

_HELLO = struct.Struct("!32sI")
"""The code of this rank, and who it is: others may find the port, too."""

_NUMBER = struct.Struct("!I")

_GOODBYE = 2**32 - 1
"""Instead of the rank that is gone: whoever sends this leaves with all others."""

_IDLE_S, _INTERVAL_S, _NUM_PROBES = 60, 10, 6
"""When a kernel asks whether the other machine is there, and how often until it is not."""

_JOIN_S = 5.0
"""Seconds for the thread to end, which has nothing more to wait for."""


class Peers:
    """The connections of one rank, until `close`.

    Args:
        size: How many ranks there are.
        code: What a rank says to be admitted, which nobody else can know.
        on_lost: Called once for each rank that is gone, with its number, in the thread.
    """

    def __init__(
        self, size: int, code: Callable[[int], bytes], on_lost: Callable[[int], None]
    ) -> None:
        self._size = size
        self._code = code
        self._on_lost = on_lost
        self._selector = selectors.DefaultSelector()
        self._is_first = False
        self._connections: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._watch, name="forge-peers", daemon=True)
        _all.add(self)

    def listen(self, *, is_local: bool) -> int:
        """Be rank 0: the others may come at any time.

        Args:
            is_local: Whether they come to 127.0.0.1.
        Returns:
            The port.
        """
        both = socket.has_dualstack_ipv6() and not is_local
        self._listener = socket.create_server(
            (LOOPBACK if is_local else "", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=self._size,
        )
        self._selector.register(self._listener, selectors.EVENT_READ, self._admit)
        self._is_first = True
        self._thread.start()
        port: int = self._listener.getsockname()[1]
        return port

    def join(self, rank: int, address: str, port: int, timeout_s: float) -> None:
        """Be another rank.

        Raises:
            RankLost: Where rank 0 cannot be reached.
        """
        try:
            connection = socket.create_connection((address, port), timeout_s)
            connection.settimeout(None)
            connection.sendall(_HELLO.pack(self._code(rank), rank))
        except OSError as error:
            raise RankLost(f"Rank 0 is gone: {address} port {port}: {error}") from error
        self._keep(0, connection)
        self._thread.start()

    def _keep(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE_S),
            ("TCP_KEEPINTVL", _INTERVAL_S),
            ("TCP_KEEPCNT", _NUM_PROBES),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connections[rank] = connection
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._hear(rank, connection)
        )

    def _watch(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                key.data()

    def _admit(self) -> None:
        """A rank comes, or somebody who has found the port."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it was closed
            self._stop_listening()
            return
        connection.settimeout(None)

        def introduced() -> None:
            self._selector.unregister(connection)
            with contextlib.suppress(OSError, struct.error):
                code, rank = _HELLO.unpack(connection.recv(_HELLO.size))
                is_rank = hmac.compare_digest(code, self._code(rank))
                if is_rank and rank not in self._connections:
                    self._keep(rank, connection)
                    if len(self._connections) == self._size - 1:
                        self._stop_listening()
                    return
            connection.close()

        self._selector.register(connection, selectors.EVENT_READ, introduced)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _hear(self, rank: int, connection: socket.socket) -> None:
        """That rank leaves, is gone, or says which other is."""
        try:
            found = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:  # reset, or its machine does not answer
            found = b""
        number = _NUMBER.unpack(found)[0] if len(found) == _NUMBER.size else rank
        if number in (rank, _GOODBYE):
            self._selector.unregister(connection)
        if number != _GOODBYE:
            self._on_lost(number)
            if self._is_first:
                self._tell(number)

    def _tell(self, number: int) -> None:
        """Say it to all others that are connected."""
        for rank, connection in list(self._connections.items()):
            if rank != number:
                with contextlib.suppress(OSError):
                    connection.sendall(_NUMBER.pack(number))

    def say_goodbye(self) -> None:
        """All leave: from here on no rank that is gone is lost."""
        self._tell(_GOODBYE)

    def leave(self, linger_s: float) -> None:
        """Leave without the others, who see it.

        Args:
            linger_s: Seconds to wait until they have left as well.
        """
        for one in self._sockets():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR if one is self._listener else socket.SHUT_WR)
        if linger_s:
            self._thread.join(linger_s)

    def close(self) -> None:
        """Give up the connections; one that was not left before is seen as a rank that is gone."""
        for one in self._sockets():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread, which is done then
        self._thread.join(_JOIN_S)
        self.forget()

    def _sockets(self) -> list[socket.socket]:
        own = [] if self._listener is None else [self._listener]
        return own + list(self._connections.values())

    def forget(self) -> None:
        """Close them; in a child, too, that was forked: it would hold them open."""
        for one in self._sockets():
            one.close()
        self._selector.close()


_all: weakref.WeakSet[Peers] = weakref.WeakSet()


def _forget() -> None:
    for one in list(_all):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
