"""Writing the files of a checkpoint: each rank its own, all into one folder that rank 0 publishes.

    start      all ranks have copied; rank 0 creates the folder, and its thread writes its files
    compare    meanwhile rank 0 broadcasts a digest of each of its tensors
    write      each other rank writes its state, and the tensors that differ from rank 0's
    commit     once all ranks have their files on disk: the manifest of all files, one rename

So a tensor that is equal on all ranks is written once, whether DDP or the script keeps it equal.
Each of the four is one exchange through the store in the thread that saves, never a collective:
ranks can train meanwhile. If one rank fails, all do, and existing checkpoints are unchanged.
Start and commit are in `store.py`, compare and write here. A single rank just writes.

Other ranks know only the path of the folder. Once a newer attempt has renamed its parent, that path
does not exist, and a rank of the old attempt cannot write any more.

Two threads write and checksum the tensors, past the page cache. O_DIRECT avoids a copy of every
byte and does not evict the training data from the page cache. It needs whole pages: the last,
partial page is written without it. tmpfs and some network file systems refuse O_DIRECT, some of
them only at the first write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from forge.checkpoint.format import manifest
from forge.checkpoint.format.encoding import state_text
from forge.checkpoint.format.manifest import CHUNK, Files, crc32, files_of, num_chunks
from forge.checkpoint.format.tensor_encoding import PAGE
from forge.checkpoint.staging import Reader, Snapshot, StagedFile
from forge.errors import CheckpointError
from forge.filesystem import durable
from forge.group.group import Exchange
from forge.process import sections
from forge.process.progress import Phase


def write_all(
    exchange: Exchange, folder: Path, snapshot: Snapshot, check: Callable[[], None] | None
) -> Files:
    """Write the snapshots that all ranks took at the same step boundary.

    Args:
        folder: The folder for the files of all ranks.
        check: On rank 0: `Workspace.check`, which raises if the folder is gone because a newer
            attempt has taken it away.
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


def write_state(
    folder: Path, snapshot: Snapshot, rank: int = 0, shared: Collection[str] = frozenset()
) -> Files:
    """Write and sync a rank's files; the caller syncs `folder`.

    Args:
        shared: Names of tensors to leave out, since rank 0 writes the same values.
    Raises:
        OSError: From the disk; FileNotFoundError if a newer attempt has taken over.
    """
    state, tensors = files_of(rank)
    text = state_text(snapshot.tree)
    file = snapshot.file.without(shared) if shared else snapshot.file
    return {
        tensors: write_file(folder / tensors, file),
        state: manifest.write_small(folder / state, text),
    }


def write_file(path: Path, file: StagedFile) -> dict[str, Any]:
    """Write the tensors' file and sync it.

    Returns:
        The file's entry for the manifest.
    Raises:
        OSError: From the disk.
    """
    readers = file.readers()
    with durable.new_file(path) as fd:
        output = _Output(fd, file.layout.size)
        output.write(readers)
    return {"size": file.layout.size, "chunks": output.checksums}


class _Output:
    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._is_direct = False
        self._set_direct(is_direct=size >= PAGE)
        self._tail = size % PAGE if self._is_direct else 0
        self.checksums = [0] * num_chunks(size)
        self._numbers: Iterator[int] = iter(range(len(self.checksums)))
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def write(self, readers: list[Reader]) -> None:
        """Write all chunks, then the last partial page."""
        helpers = [
            threading.Thread(target=self._work, args=(reader,), name="forge-write", daemon=True)
            for reader in readers[1:]
        ]
        for helper in helpers:
            helper.start()
        self._work(readers[0])
        for helper in helpers:
            helper.join()
        if self._failures:
            raise self._failures[0]
        if self._tail:
            self._set_direct(is_direct=False)
            number, left = divmod(self._size, CHUNK)
            self._put(readers[0](number)[left - self._tail : left], self._size - self._tail)

    def _work(self, reader: Reader) -> None:
        try:
            while not self._failures:
                with self._lock:
                    number = next(self._numbers, None)
                if number is None:
                    return
                begin = number * CHUNK
                piece = reader(number)[: self._size - begin]
                self.checksums[number] = crc32(piece)
                self._put(piece[: self._size - self._tail - begin], begin)
        except BaseException as error:  # noqa: BLE001 - raised again by `write`
            self._failures.append(error)

    def _put(self, piece: memoryview, position: int) -> None:
        while piece:
            was_direct = self._is_direct  # the other thread can change it meanwhile
            try:
                count = os.pwrite(self._fd, piece, position)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._set_direct(is_direct=False)  # refused at the first write
                continue
            if was_direct and count % PAGE:
                count -= count % PAGE  # the disk is nearly full: the next write raises
                if not count:
                    self._set_direct(is_direct=False)
            piece, position = piece[count:], position + count
            sections.current().advance(Phase.save)

    def _set_direct(self, *, is_direct: bool) -> None:
        if not hasattr(os, "O_DIRECT"):  # macOS
            return
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        except OSError:
            if not is_direct:
                raise
            return  # refused by the file system: use the page cache
        self._is_direct = is_direct
