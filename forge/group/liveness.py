"""Liveness of ranks: each rank keeps a TCP connection to rank 0, which closes when it dies.

    rank r    connects to rank 0 and authenticates once, then sends nothing until it leaves
    rank 0    sees when a connection closes, and tells the other ranks which rank is gone

When a process ends for any reason, the kernel closes its connections; a process that is suspended
or busy for half an hour keeps them. While all ranks live nothing is sent; TCP keepalive detects a
lost machine. A thread sleeps until there is data to read.
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
"""Authentication code and rank: other processes can connect to the port, too."""

_NUMBER = struct.Struct("!I")

_GOODBYE = 2**32 - 1
"""Sent instead of a lost rank: all ranks are leaving together."""

_IDLE_S, _INTERVAL_S, _NUM_PROBES = 60, 10, 6
"""TCP keepalive: idle time, interval, and number of probes until the machine counts as lost."""

_JOIN_S = 5.0
"""Timeout in seconds for the thread to end after the connections are closed."""


class LivenessMonitor:
    """The connections of one rank, until `close`.

    Args:
        size: The number of ranks.
        code: Maps a rank to its secret authentication code.
        on_lost: Called in the thread with the number of each rank that is gone, once per rank.
    """

    def __init__(
        self, size: int, code: Callable[[int], bytes], on_lost: Callable[[int], None]
    ) -> None:
        self._size = size
        self._code = code
        self._on_lost = on_lost
        self._selector = selectors.DefaultSelector()
        self._is_first = self._is_leaving = False
        self._connections: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._watch, name="forge-peers", daemon=True)
        _all.add(self)

    def listen(self, *, is_local: bool) -> int:
        """On rank 0: accept connections from the other ranks.

        Args:
            is_local: Whether to listen on 127.0.0.1 only.
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
        """On other ranks: connect to rank 0.

        Raises:
            RankLost: If rank 0 cannot be reached.
        """
        try:
            connection = socket.create_connection((address, port), timeout_s)
            connection.settimeout(None)
            connection.sendall(_HELLO.pack(self._code(rank), rank))
        except OSError as error:
            raise RankLost(
                f"Rank 0 is gone: cannot connect to {address} port {port} ({error})"
            ) from error
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
        """Accept a connection, which can also be from an unrelated process."""
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
        """Handle data from a rank: it leaves, is gone, or reports another rank as gone."""
        try:
            found = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:  # connection reset, or keepalive failed
            found = b""
        number = _NUMBER.unpack(found)[0] if len(found) == _NUMBER.size else rank
        if number in (rank, _GOODBYE):
            self._selector.unregister(connection)
        if number != _GOODBYE:
            # Before `on_lost`, after which this process can exit: the others would see rank 0 as
            # gone. A connection that this rank itself has closed says nothing of the other end.
            if self._is_first and not self._is_leaving:
                self._tell(number)
            self._on_lost(number)

    def _tell(self, number: int) -> None:
        """Send a number to all connected ranks except that one."""
        for rank, connection in list(self._connections.items()):
            if rank != number:
                with contextlib.suppress(OSError):
                    connection.sendall(_NUMBER.pack(number))

    def say_goodbye(self) -> None:
        """Tell the others that all ranks leave: closed connections are normal from now on."""
        self._tell(_GOODBYE)

    def leave_alone(self, linger_s: float) -> None:
        """Leave alone; the other ranks see this rank as gone.

        Args:
            linger_s: Seconds to wait for the others to leave as well.
        """
        self._shut_down(socket.SHUT_WR)
        if linger_s:
            self._thread.join(linger_s)

    def close(self) -> None:
        """Close the connections; without a goodbye, the others see this rank as gone."""
        self._shut_down(socket.SHUT_RDWR)  # wakes the thread, which then ends
        self._thread.join(_JOIN_S)
        self.forget()

    def _shut_down(self, how: int) -> None:
        self._is_leaving = True
        for one in self._sockets():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR if one is self._listener else how)

    def _sockets(self) -> list[socket.socket]:
        own = [] if self._listener is None else [self._listener]
        return own + list(self._connections.values())

    def forget(self) -> None:
        """Close the sockets; forked children do it, too, since they would keep them open."""
        for one in self._sockets():
            one.close()
        self._selector.close()


_all: weakref.WeakSet[LivenessMonitor] = weakref.WeakSet()


def _forget() -> None:
    for one in list(_all):
        one.forget()


os.register_at_fork(after_in_child=_forget)
