"""Many ranks as one: they agree by published limits, beside training and without a collective.

    rank i       proposes a fact: round/<n> in a store that rank 0 hosts
    each rank r  a thread, woken by that: limit/<n>/<r> = the boundary before which r does not wait
                 once all limits are there, the fact counts from the largest of them on;
                 a stop counts at once where all ranks hold the same boundary
    main of r    at boundary k: below its limit it goes on; else it waits for its own thread;
                 with a fact of its own it waits at the next one, until all limits are there

No rank is asked to act at a boundary that it has passed: after it has published a limit, it passes
no boundary from there on before the decision, which is never below the limit of any. All read the
same numbers. It ends, because a main thread waits only for threads, which answer while their main
thread stands in a collective, and because a rank that is gone is seen (`peers.py`). In a quiet step
nothing is sent: the threads sleep in the store. Each message is sealed (`secret.py`), since the
store asks nobody who they are.
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
from forge.group import facts, store
from forge.group.facts import Agreed, Fact, SaveAsked, StopAsked
from forge.group.introduction import Introduction
from forge.group.peers import Peers
from forge.group.secret import Secret
from forge.group.store import Connection
from forge.process import sections
from forge.process.progress import Section

START_S = 300.0
"""Seconds that the ranks of a job may come after each other to its start."""

ANSWER_S = 120.0
"""Seconds that a rank may take to answer a proposal: its thread does nothing else."""

MARGIN = 1
"""Boundaries that a rank may pass while a round is open: it saves waiting, no more."""

_CONNECT_S = 30.0
"""Seconds to reach the store of rank 0."""

_END = "end"
"""Instead of a fact: there is none any more."""

_LINGER_S = 3.0
"""Seconds that rank 0, which hosts the store, waits for others that leave for the same reason."""

_PAUSE_S = 0.05
"""Seconds at most until whoever gathers looks again."""

_PAUSE_SHARE = 0.1
"""Of the time that it has waited: an exchange takes as much longer at most."""

_STORE_S = 10**9
"""Seconds that a thread sleeps in the store: until there is a proposal, or the store is gone."""


class Ranks:
    """The ranks of an initialised `torch.distributed`, until `close`.

    Collective: all ranks make one at the same time.

    Args:
        folder: Called on rank 0; where it leaves the secret of the ranks, the job's `.forge`. None:
            what they give each other is only printed, and may be anybody's.
    """

    def __init__(self, folder: Callable[[], Path] | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._changed = threading.Condition()
        self._lost = ""
        """Why they can no longer agree."""
        self._when_lost: Callable[[], object] = bool
        self._is_closed = False
        self._server: Any = None
        with self._failing("the start"):
            found = Introduction(self.rank, self.size, START_S, folder).make(self._listen)
            self._secret, self._address = found.secret, (found.address, found.ports[0])
            self._here = threading.local()
            self._connection()  # now: one to a store that is gone would be tried for long
        self._begun = -1
        """The boundary that was passed last."""
        self._held = -1
        """The boundary that this rank holds."""
        self._held_stop: StopAsked | None = None
        """The stop of which all learned while they held one."""
        self._limit = math.inf
        """From there on a boundary waits for the round that is open."""
        self._own: dict[str, int] = {}
        """Facts of this rank that are not agreed on yet, and which boundary waits for that."""
        self._rounds: collections.deque[tuple[int, Fact]] = collections.deque()
        """Facts that do not count yet, and from which boundary on; it never falls."""
        self._agreed = Agreed()
        self._seen: set[str] = set()
        self._clock: SaveAsked | None = None
        """The save by the clock that was proposed, until it counts."""
        self._to_propose: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Connected now: a name server may take seconds over an address, and a signal waits then.
        send, answer = (self._send, self._client()), (self._answer, self._client())
        self._threads = [
            threading.Thread(target=self._guarded, args=send, name="forge-propose", daemon=True),
            threading.Thread(target=self._guarded, args=answer, name="forge-agree", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if self.rank:
            self._peers = Peers(self.size, self._secret.code_of, self._lose)
            self._peers.join(self.rank, found.address, found.ports[1], _CONNECT_S)

    def _listen(self, secret: Secret, is_local: bool) -> list[int]:  # noqa: FBT001 - a callback
        """Host the store, and wait for the others; the ports of both."""
        self._server = store.host(is_local=is_local)
        self._peers = Peers(self.size, secret.code_of, self._lose)
        return [self._server.port, self._peers.listen(is_local=is_local)]

    def _client(self) -> Connection:
        """A connection of its own: whoever waits in the store holds his."""
        timeout_s = _LINGER_S if self._lost else _CONNECT_S
        return Connection(store.connect(*self._address, timeout_s), self._secret, self._distrust)

    def _connection(self) -> Connection:
        """That of this thread."""
        if not hasattr(self._here, "client"):
            self._here.client = self._client()
        found: Connection = self._here.client
        return found

    # -- facts -----------------------------------------------------------------------------------

    def propose(self, fact: Fact) -> None:
        """See `Group.propose`."""
        text = facts.to_text(fact)
        with self._changed:
            if text in self._seen or text in self._own or not self._is_news(fact):
                return
            self._own[text] = self._begun + 1
        self._to_propose.put(text)

    def agreed(self, boundary: int) -> Agreed:
        """See `Group.agreed`."""
        with self._changed:
            if not self._is_free(boundary) and not self._lost:
                with sections.current().inside(Section.collective):
                    self._changed.wait_for(lambda: self._is_free(boundary) or self._lost, ANSWER_S)
            if self._lost or not self._is_free(boundary):
                raise RankLost(self._lost or f"A rank has not answered within {ANSWER_S:g} s")
            self._begun = boundary
            while self._rounds and self._rounds[0][0] <= boundary:
                _, fact = self._rounds.popleft()
                self._agreed = self._agreed.including(fact)
                if fact == self._clock:
                    self._clock = None
            return self._agreed

    def _is_free(self, boundary: int) -> bool:
        """Whether neither the round that is open nor a fact of this rank has it wait."""
        return boundary < min((self._limit, *self._own.values()))

    def hold(self, boundary: int) -> None:
        """See `Group.hold`."""
        with self._changed:
            self._held = boundary

    def held_stop(self) -> StopAsked | None:
        """See `Group.held_stop`."""
        return self._held_stop

    def let_go(self) -> StopAsked | None:
        """See `Group.let_go`."""
        with self._changed:
            # What this rank has published, it keeps to.
            with sections.current().inside(Section.collective):
                self._changed.wait_for(lambda: self._limit == math.inf or self._lost, ANSWER_S)
            self._held = -1
            if self._held_stop is None and (self._lost or self._limit != math.inf):
                raise RankLost(self._lost or f"A rank has not answered within {ANSWER_S:g} s")
            return self._held_stop

    def _guarded(self, run: Callable[[Connection], None], client: Connection) -> None:
        try:
            run(client)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            text = str(error).partition("\n")[0]  # torch adds its C++ stack
            self._cannot_agree(f"The ranks can no longer agree: {text}")

    def _lose(self, rank: int) -> None:
        self._cannot_agree(f"Rank {rank} of {self.size} is gone")

    def _distrust(self, text: str) -> None:
        """Somebody else writes into the store; said now, since the main thread may hang."""
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
        """See `Group.when_lost`."""
        with self._changed:
            self._when_lost = act
            if self._lost:
                act()

    def lost(self, timeout_s: float) -> str:
        """See `Group.lost`."""
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

    def _is_news(self, fact: Fact) -> bool:
        """Whether it is no save by the clock: rank 0 asks for those, one at a time."""
        if isinstance(fact, SaveAsked) and fact.is_periodic:
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
            fact = facts.from_text(text)
            with self._changed:
                self._seen.add(text)
                self._own.pop(text, None)
                if held >= 0 and isinstance(fact, StopAsked) and {h for _, h in found} == {held}:
                    self._held_stop = self._held_stop or fact
                else:
                    self._rounds.append((max(since for since, _ in found), fact))
                self._limit = math.inf
                self._changed.notify_all()
            number += 1

    # -- values ----------------------------------------------------------------------------------

    def gather(
        self, key: str, value: bytes, timeout_s: float, unless: Callable[[], object] | None = None
    ) -> list[bytes]:
        """See `Group.gather`."""
        began = time.monotonic()
        keys = [f"given/{key}/{rank}" for rank in range(self.size)]
        if unless is not None and unless():  # the others may be gone by then
            return []
        with self._failing(key):
            client = self._give(key, value)
            if not client.check(keys):
                with sections.current().inside(Section.collective):
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
        """Wait for them, unless `unless` comes true first."""
        while not client.check(keys):  # torch warns of each wait that ends without an answer
            if unless is not None and unless():
                return False
            waited_s = time.monotonic() - began
            time.sleep(min(max(0.001, _PAUSE_SHARE * waited_s), _PAUSE_S))
            if self._lost and not client.check(keys):  # it may have left with all others
                raise RankLost(f"{self._lost}, before {key} of all ranks")
            if self._is_closed or waited_s >= timeout_s:
                missing = [rank for rank, one in enumerate(keys) if not client.check([one])]
                raise RankLost(
                    f"Rank {', '.join(map(str, missing))} of {self.size} has not come to"
                    f" {key} within {timeout_s:g} s"
                )
        return True

    def forget(self, key: str) -> None:
        """See `Group.forget`."""
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
            raise RankLost(f"Rank 0 is gone, before {key} of all ranks: {text}") from error

    def close(self, timeout_s: float) -> None:
        """See `Group.close`; rank 0, which hosts the store, leaves last."""
        if self._is_closed:
            return
        with contextlib.suppress(RankLost), self._failing("the end"):
            if not timeout_s or self._lost:
                self._peers.leave(linger_s=0.0 if self.rank else _LINGER_S)
            else:
                self.gather("the end", b"", timeout_s)
                self._peers.say_goodbye()
                self._to_propose.put(_END)
                for thread in self._threads:
                    thread.join(timeout_s)
                self._give("nothing more", b"")
                if self.rank == 0:
                    self.gather("nothing more", b"", timeout_s)
        self._is_closed = True
        self._peers.close()
        self._server = None
