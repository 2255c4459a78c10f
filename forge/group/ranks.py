"""How several ranks agree on requests: through a store, in the background, without a collective.

    rank i       proposes a request: round/<n> in a store that rank 0 hosts
    each rank r  its thread wakes up and publishes limit/<n>/<r>: the first boundary that r will not
                 pass before the decision. Once all limits are published, the request counts from
                 the largest limit on; a stop counts immediately if all ranks hold the same boundary
    main of r    at boundary k: below its limit it continues, else it waits for its own thread;
                 after its own proposal it waits at the next boundary until all limits are published

So no rank has to act at a boundary that it has already passed: a rank does not pass its published
limit before the decision, and the decision is never below any limit. All ranks compute it from the
same numbers. There is no deadlock: main threads wait only for these threads, which answer even
while their main thread is in a collective, and a dead rank is detected (`liveness.py`). A step
without a request sends nothing: the threads sleep in the store. Messages are authenticated
(`secret.py`), since the store is open to any process.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge import messages
from forge.errors import RankLost
from forge.group import distributed, requests, store
from forge.group.group import MARGIN, START_S, Coordinator
from forge.group.introduction import Introduction
from forge.group.liveness import LivenessMonitor
from forge.group.requests import Consensus, Request, SaveRequest, StopRequest
from forge.group.secret import Secret
from forge.group.store import Connection
from forge.process import sections
from forge.process.progress import Phase

ANSWER_S = 120.0
"""Timeout in seconds for a rank to answer a proposal: its thread does nothing else."""

_CONNECT_S = 30.0
"""Timeout in seconds to connect to the store of rank 0."""

_END = "end"
"""Sent instead of a request: the threads end."""

_LINGER_S = 3.0
"""Seconds that rank 0, which hosts the store, waits for others that leave for the same reason."""

_PAUSE_S = 0.05
"""Longest pause in seconds between two polls of a gather."""

_PAUSE_SHARE = 0.1
"""Pause as a share of the time waited so far: polling makes an exchange at most 10 % longer."""

_SECOND = 2
"""The boundary after the first step of an attempt."""

_STORE_S = 10**9
"""Timeout of a thread that waits in the store: in effect no limit."""


class StoreCoordinator(Coordinator):
    """The ranks of an initialised `torch.distributed`, until `close`.

    All ranks have to create it at the same time.

    Args:
        folder: Called on rank 0; returns the folder for the ranks' secret, the job's `.forge`.
            None: messages are only printed, and need no authentication.
    """

    def __init__(self, folder: Callable[[], Path] | None = None) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._changed = threading.Condition()
        self._lost = ""
        """Why the ranks can no longer agree; empty as long as they can."""
        self._when_lost: Callable[[], object] = bool
        self._is_closed = False
        self._server: Any = None
        with self._failing("the start"):
            found = Introduction(self.rank, self.size, START_S, folder).make(self._listen)
            self._secret, self._address = found.secret, (found.address, found.ports[0])
            self._here = threading.local()
            self._connection()  # connect now: if the store dies later, connecting takes long
        self._begun = -1
        """The last boundary that was passed."""
        self._held = -1
        """The boundary that this rank holds, or -1."""
        self._held_stop: StopRequest | None = None
        """A stop that all ranks received while holding the same boundary."""
        self._limit = math.inf
        """Boundaries from this one on wait until the ranks have agreed."""
        self._own: dict[str, int] = {}
        """Pending request of this rank -> the boundary that waits for its agreement."""
        self._rounds: collections.deque[tuple[int, Request]] = collections.deque()
        """(boundary from which it counts, request) for agreed requests; boundaries never fall."""
        self._seen: set[str] = set()
        self._clock: SaveRequest | None = None
        """The periodic save that was proposed, until it counts."""
        self._to_propose: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Connect now: a slow name server would otherwise delay the reaction to a signal.
        send, answer = (self._send, self._client()), (self._answer, self._client())
        self._threads = [
            threading.Thread(target=self._guarded, args=send, name="forge-propose", daemon=True),
            threading.Thread(target=self._guarded, args=answer, name="forge-agree", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if self.rank:
            self._peers = LivenessMonitor(self.size, self._secret.code_of, self._lose)
            self._peers.join(self.rank, found.address, found.ports[1], _CONNECT_S)

    def _listen(self, secret: Secret, is_local: bool) -> list[int]:  # noqa: FBT001 - a callback
        """Host the store and the liveness monitor; returns the ports of both."""
        self._server = store.host(is_local=is_local)
        self._peers = LivenessMonitor(self.size, secret.code_of, self._lose)
        return [self._server.port, self._peers.listen(is_local=is_local)]

    def _client(self) -> Connection:
        """A new connection: a thread that waits in the store blocks its connection."""
        timeout_s = _LINGER_S if self._lost else _CONNECT_S
        return Connection(store.connect(*self._address, timeout_s), self._secret, self._distrust)

    def _connection(self) -> Connection:
        """The connection of this thread."""
        if not hasattr(self._here, "client"):
            self._here.client = self._client()
        found: Connection = self._here.client
        return found

    # -- requests --------------------------------------------------------------------------------

    def propose(self, fact: Request) -> None:
        """See `Coordinator.propose`."""
        text = requests.to_text(fact)
        with self._changed:
            if text in self._seen or text in self._own or not self._is_news(fact):
                return
            self._own[text] = self._begun + 1
        self._to_propose.put(text)

    def agreed(self, boundary: int) -> Consensus:
        """See `Coordinator.agreed`."""
        if boundary == _SECOND:
            distributed.first_step_is_done()
        with self._changed:
            if not self._is_free(boundary) and not self._lost:
                with sections.current().inside(Phase.collective):
                    self._changed.wait_for(lambda: self._is_free(boundary) or self._lost, ANSWER_S)
            if self._lost or not self._is_free(boundary):
                late = f"Timed out after {ANSWER_S:g} s waiting for the other ranks at this step"
                raise RankLost(self._lost or late)
            self._begun = boundary
            while self._rounds and self._rounds[0][0] <= boundary:
                _, fact = self._rounds.popleft()
                self._agreed = self._agreed.including(fact)
                if fact == self._clock:
                    self._clock = None
            return self._agreed

    def _is_free(self, boundary: int) -> bool:
        """Whether no agreement in progress and no request of this rank blocks the boundary."""
        return boundary < min((self._limit, *self._own.values()))

    def hold(self, boundary: int) -> None:
        """See `Coordinator.hold`."""
        with self._changed:
            self._held = boundary

    def held_stop(self) -> StopRequest | None:
        """See `Coordinator.held_stop`."""
        return self._held_stop

    def let_go(self) -> StopRequest | None:
        """See `Coordinator.let_go`."""
        with self._changed:
            # Wait for the decision: this rank must respect its published limit.
            with sections.current().inside(Phase.collective):
                self._changed.wait_for(lambda: self._limit == math.inf or self._lost, ANSWER_S)
            self._held = -1
            if self._held_stop is None and (self._lost or self._limit != math.inf):
                late = f"Timed out after {ANSWER_S:g} s waiting for the other ranks to stop"
                raise RankLost(self._lost or late)
            return self._held_stop

    def _guarded(self, run: Callable[[Connection], None], client: Connection) -> None:
        try:
            run(client)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            text = str(error).partition("\n")[0]  # torch adds its C++ stack
            self._cannot_agree(f"The ranks can no longer coordinate: {text}")

    def _lose(self, rank: int) -> None:
        self._cannot_agree(f"Rank {rank} of {self.size} is gone")

    def _distrust(self, text: str) -> None:
        """Log a forged message now, since the main thread can be blocked in a collective."""
        if not self._lost:
            messages.say(text, logging.ERROR)
        self._cannot_agree(text)

    def _cannot_agree(self, text: str) -> None:
        with self._changed:
            if not self._is_closed:
                self._lost = self._lost or text
                self._when_lost()
            self._changed.notify_all()

    def when_lost(self, act: Callable[[], None]) -> None:
        """See `Coordinator.when_lost`."""
        with self._changed:
            self._when_lost = act
            if self._lost:
                act()

    def lost(self, timeout_s: float) -> str:
        """See `Coordinator.lost`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, timeout_s)
            return self._lost

    def _send(self, client: Connection) -> None:
        number = 0
        while True:
            text = self._to_propose.get()
            content = text.encode()
            while client.compare_set(f"round/{number}", "", content) != content:
                number += 1
            if text == _END:
                return

    def _is_news(self, fact: Request) -> bool:
        """Whether to propose it: only rank 0 proposes periodic saves, one at a time."""
        if isinstance(fact, SaveRequest) and fact.is_periodic:
            if self.rank != 0 or self._clock is not None:
                return False
            self._clock = fact
        return True

    def _answer(self, client: Connection) -> None:
        number = 0
        client.set_timeout(timedelta(seconds=_STORE_S))
        while True:
            text = client.get(f"round/{number}").decode()
            if text == _END:
                return
            with self._changed:
                self._limit = limit = self._begun + 1 + MARGIN
                held = self._held
            client.set(f"limit/{number}/{self.rank}", f"{limit} {held}".encode())
            keys = [f"limit/{number}/{rank}" for rank in range(self.size)]
            client.wait(keys, timedelta(seconds=ANSWER_S))
            found = [tuple(map(int, one.split())) for one in client.multi_get(keys)]
            fact = requests.from_text(text)
            with self._changed:
                self._seen.add(text)
                self._own.pop(text, None)
                if held >= 0 and isinstance(fact, StopRequest) and {h for _, h in found} == {held}:
                    self._held_stop = self._held_stop or fact
                else:
                    self._rounds.append((max(since for since, _ in found), fact))
                self._limit = math.inf
                self._changed.notify_all()
            number += 1

    # -- values ----------------------------------------------------------------------------------

    def publish(self, key: str, value: bytes) -> None:
        """See `Coordinator.publish`; an iterator that outlives the Run publishes nothing."""
        if not self._is_closed:
            with self._failing(key):
                self._give(key, value)

    def gather(
        self, key: str, value: bytes, timeout_s: float, unless: Callable[[], object] | None = None
    ) -> list[bytes]:
        """See `Coordinator.gather`."""
        began = time.monotonic()
        keys = [f"given/{key}/{rank}" for rank in range(self.size)]
        if unless is not None and unless():  # the other ranks can be gone already
            return []
        with self._failing(key):
            client = self._give(key, value)
            if not client.check(keys):
                with sections.current().inside(Phase.collective):
                    if not self._are_given(client, key, keys, began, timeout_s, unless):
                        return []
            return client.multi_get(keys)

    def _are_given(
        self,
        client: Connection,
        key: str,
        keys: list[str],
        began: float,
        timeout_s: float,
        unless: Callable[[], object] | None,
    ) -> bool:
        """Wait for all values, unless `unless` becomes true first."""
        while not client.check(keys):  # polled: torch's wait logs a warning when it times out
            if unless is not None and unless():
                return False
            waited_s = time.monotonic() - began
            time.sleep(min(max(0.001, _PAUSE_SHARE * waited_s), _PAUSE_S))
            if self._lost and not client.check(keys):  # a rank that sent its value can leave
                raise RankLost(f'{self._lost}, while this rank waited at the barrier "{key}"')
            if self._is_closed or waited_s >= timeout_s:
                raise store.timeout(client, keys, timeout_s, f'at the barrier "{key}"')
        return True

    def forget(self, key: str) -> None:
        """See `Coordinator.forget`."""
        with self._failing(key):
            self._connection().delete_key(f"given/{key}/{self.rank}")

    def _give(self, key: str, value: bytes) -> Connection:
        client = self._connection()
        client.set(f"given/{key}/{self.rank}", value)
        return client

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        try:
            yield
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            text = str(error).partition("\n")[0]
            raise RankLost(
                f'Rank 0 is gone, while this rank waited at the barrier "{key}": {text}'
            ) from error

    def close(self, timeout_s: float) -> None:
        """See `Coordinator.close`; rank 0, which hosts the store, leaves last."""
        if self._is_closed:
            return
        with contextlib.suppress(RankLost), self._failing("the end"):
            if not timeout_s or self._lost:
                self._peers.leave_alone(linger_s=0.0 if self.rank else _LINGER_S)
            else:
                self.gather("the end", b"", timeout_s)
                self._peers.say_goodbye()
                self._end_threads(timeout_s)
                self._give("nothing more", b"")
                if self.rank == 0:
                    self.gather("nothing more", b"", timeout_s)
        self._is_closed = True
        self._peers.close()
        self._end_threads(_LINGER_S)
        self._server = None

    def _end_threads(self, timeout_s: float) -> None:
        """End the threads that wait in the store: at its end Python would abort because of them."""
        self._to_propose.put(_END)
        for thread in self._threads:
            thread.join(timeout_s)
