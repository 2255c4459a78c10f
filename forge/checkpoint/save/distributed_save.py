"""Distributed save: each rank stages its own files, and rank 0 publishes the checkpoint.

    begin      all ranks have copied; rank 0 creates the folder, and its thread writes its files
    compare    meanwhile rank 0 broadcasts a digest of each of its tensors
    stage      each other rank writes its state, and the tensors that differ from rank 0's
    commit     once all ranks have their files on disk: the manifest of all files, one rename

So a tensor that is equal on all ranks is written once, whether DDP or the script keeps it equal.
Each of the four is one exchange through the store in the thread that saves, never a collective:
ranks can train meanwhile. If one rank fails, all do, and existing checkpoints are unchanged.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NoReturn

from forge.checkpoint.save.staging import StagedPart, stage
from forge.checkpoint.save.staging_pool import Snapshot
from forge.errors import DamagedCheckpoint, Exit, ExitCode, ForgeError, RankFailed
from forge.group.group import Coordinator

EXCHANGE_S = 1800.0
"""Timeout in seconds for a rank to write its files; if the run ends, the wait ends as well."""

START = "the start of a save"
"""The first exchange: a rank that has nothing to save raises here."""

_DAMAGE, _AGAIN, _END = 1, 2, 3
"""Weights of errors: an older checkpoint is read, the save is retried, the job ends."""


class Exchange:
    """All-gathers values through the store; each rank must make the same calls in the same order.

    Args:
        name: Unique among the exchanges of these ranks: another thread can have its own.
    """

    def __init__(self, ranks: Coordinator, name: str, timeout_s: float = EXCHANGE_S) -> None:
        self.ranks = ranks
        self._name = name
        self._timeout_s = timeout_s
        self._count = 0
        self._previous = ""

    def all_gather(
        self,
        what: str,
        make: Callable[[], Any],
        unless: Callable[[], object] | None = None,
        within_s: float | None = None,
    ) -> list[Any]:
        """All-gather the JSON result of `make`, in order of rank; empty once `unless` is true.

        Raises:
            OSError: If `make` raised one, here or on another rank.
            ForgeError: Likewise; if ranks raise different errors, one that ends the job wins.
        """
        if self.ranks.size == 1:
            return [make()]
        self._count += 1
        limit_s = self._timeout_s if within_s is None else within_s
        error: BaseException | None = None
        try:
            value = {"value": make()}
        except (Exception, Exit) as raised:  # noqa: BLE001 - raised again once all ranks know
            error, value = raised, _described(raised)
        key = f"{what} ({self._name} {self._count})"
        texts = self.ranks.gather(key, json.dumps(value).encode(), limit_s, unless)
        if not texts:
            return []
        if self._previous:  # all ranks have read it, or they would not be in this exchange
            self.ranks.forget(self._previous)
        self._previous = key
        found = [json.loads(text) for text in texts]
        worst = max((one.get("weight", 0), -rank) for rank, one in enumerate(found))
        if worst[0]:
            if error is not None and value["weight"] == worst[0]:
                raise error
            _raise_again(-worst[1], found[-worst[1]], error)
        return [one["value"] for one in found]

    def broadcast(self, what: str, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and broadcast its result."""
        return self.all_gather(what, make if self.ranks.rank == 0 else lambda: None)[0]


def _described(error: BaseException) -> dict[str, Any]:
    """An error as JSON; all ranks act on the error of the highest weight, so they do the same."""
    if isinstance(error, OSError):
        return {"error": str(error), "errno": error.errno or errno.EIO, "weight": _AGAIN}
    if isinstance(error, DamagedCheckpoint):
        return {"error": str(error), "weight": _DAMAGE}
    if isinstance(error, Exit):
        return {"error": error.text, "code": int(error.code or 0), "weight": _END}
    code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FORCED
    return {"error": f"{type(error).__name__}: {error}", "code": int(code), "weight": _END}


def _raise_again(rank: int, said: dict[str, Any], own: BaseException | None) -> NoReturn:
    text = f"rank {rank}: {said['error']}"
    if said["weight"] == _AGAIN:
        raise OSError(said["errno"], text) from own
    if said["weight"] == _DAMAGE:
        raise DamagedCheckpoint(text) from own
    raise RankFailed(text, said["code"]) from own


def save(
    exchange: Exchange,
    snapshot: Snapshot,
    begin: Callable[[], str | None],
    check: Callable[[], None],
    publish: Callable[[Path, list[StagedPart]], None],
) -> bool:
    """Save the snapshots that all ranks took at the same step boundary.

    Args:
        begin: Called on each rank; on rank 0 it creates the folder for the files of all ranks,
            or returns None if there is nothing to save.
        check: Called on rank 0; raises if a newer attempt has taken the folder away.
        publish: Called on rank 0, once all files are on disk.
    Returns:
        Whether there was anything to save.
    Raises:
        OSError: From the disk of any rank.
        ForgeError: From any rank.
    """
    rank, is_shared = exchange.ranks.rank, exchange.ranks.size > 1
    # Wait until all ranks have copied: writing would take cores from them.
    made = exchange.all_gather(START, begin)[0]
    if made is None:
        return False
    folder = Path(made)
    writing: Future[StagedPart] = Future()
    own: dict[str, str] = {}

    def compared() -> Any:
        if rank == 0:
            _fill(writing, lambda: stage(folder, snapshot), is_beside=is_shared)
        own.update(snapshot.digests() if is_shared else {})  # on all ranks at the same time
        return own if rank == 0 else None

    def staged() -> Any:
        shared = {name for name, digest in own.items() if known.get(name) == digest}
        try:
            part = stage(folder, snapshot, rank, shared) if rank else writing.result()
        except FileNotFoundError:
            if rank == 0:
                check()
            raise
        return [part.rank, part.step, part.files]

    try:
        known = exchange.all_gather("the digests of a save", compared)[0]
        parts = [StagedPart(*one) for one in exchange.all_gather("the files of a save", staged)]
    finally:
        if writing.running():  # the caller removes the folder next
            wait([writing])
    exchange.broadcast("the commit of a save", lambda: publish(folder, parts))
    return True


def _fill(future: Future[StagedPart], make: Callable[[], StagedPart], *, is_beside: bool) -> None:
    """Set the future to what `make` returns or raises, in a new thread or in this one."""

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    if is_beside:
        threading.Thread(target=work, name="forge-stage", daemon=True).start()
    else:
        work()
