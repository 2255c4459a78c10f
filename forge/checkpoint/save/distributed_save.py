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

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from forge.checkpoint.save.staging import StagedPart, stage
from forge.checkpoint.save.staging_pool import Snapshot
from forge.group.exchange import Exchange

START = "the start of a save"
"""The first exchange: a rank that has nothing to save raises here."""


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
