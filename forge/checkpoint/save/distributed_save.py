"""Distributed save: all ranks write their files into one folder, which rank 0 then publishes.

    start      all ranks have copied; rank 0 creates the folder, and its thread writes its files
    compare    meanwhile rank 0 broadcasts a digest of each of its tensors
    write      each other rank writes its state, and the tensors that differ from rank 0's
    commit     once all ranks have their files on disk: the manifest of all files, one rename

So a tensor that is equal on all ranks is written once, whether DDP or the script keeps it equal.
Each of the four is one exchange through the store in the thread that saves, never a collective:
ranks can train meanwhile. If one rank fails, all do, and existing checkpoints are unchanged.
Start and commit are in `store.py`, compare and write here.

Other ranks know only the path of the folder. Once a newer attempt has renamed its parent, that path
does not exist, and a rank of the old attempt cannot write any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from forge.checkpoint.format.manifest import Files
from forge.checkpoint.save.snapshot import Snapshot
from forge.checkpoint.save.writing import write_state
from forge.errors import CheckpointError
from forge.group.exchange import Exchange


def write_all(
    exchange: Exchange, folder: Path, snapshot: Snapshot, check: Callable[[], None] | None
) -> Files:
    """Write the snapshots that all ranks took at the same step boundary.

    Args:
        folder: The folder for the files of all ranks.
        check: On rank 0; raises if the folder is gone because a newer attempt has taken it away.
    Returns:
        The files of all ranks.
    Raises:
        OSError: From the disk of any rank.
        ForgeError: From any rank.
    """
    rank = exchange.ranks.rank
    if exchange.ranks.size == 1:
        return write_state(folder, snapshot)
    own: dict[str, str] = {}
    writing = _in_thread(lambda: write_state(folder, snapshot)) if rank == 0 else None

    def compared() -> Any:
        if folder.name != snapshot.name:
            raise CheckpointError(f"rank {rank} saves {snapshot.name}, but rank 0 {folder.name}")
        own.update(snapshot.digests())  # on all ranks at the same time
        return own if rank == 0 else None

    def written() -> Files:
        try:
            if writing is not None:
                return writing.result()
            shared = {name for name, digest in own.items() if known.get(name) == digest}
            return write_state(folder, snapshot, rank, shared)
        except FileNotFoundError:
            if check is not None:
                check()
            raise

    try:
        known = exchange.all_gather("the digests of a save", compared)[0]
        files = exchange.all_gather("the files of a save", written)
    finally:
        if writing is not None:
            wait([writing])  # the caller removes the folder next
    return {name: entry for some in files for name, entry in some.items()}


def _in_thread(make: Callable[[], Files]) -> Future[Files]:
    future: Future[Files] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            future.set_exception(error)

    threading.Thread(target=work, name="forge-stage", daemon=True).start()
    return future
