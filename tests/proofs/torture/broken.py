"""Patches that each break a guarantee of forge; the suite has to fail with each of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture.calls import WRITES

from forge.checkpoint import removal, writing
from forge.checkpoint.fence import Fence
from forge.checkpoint.files import CheckedFile
from forge.checkpoint.format import decoding
from forge.checkpoint.format.manifest import Files
from forge.checkpoint.removal import Remover
from forge.checkpoint.staging import Snapshot
from forge.checkpoint.store import Store
from forge.checkpoint.workspace import Workspace
from forge.checkpoint.writing import write_state
from forge.filesystem import durable


def _nothing() -> None:
    """Leave forge unchanged."""


def _no_directory_sync() -> None:
    durable.sync_directory = lambda path: None


class _OtherOs:
    """Replaces `os` in forge's modules, with some of its functions changed."""

    def __init__(self, **others: Any) -> None:
        self._others = others
        for name, module in list(sys.modules.items()):
            is_ours = name.startswith(("forge.checkpoint.", "forge.filesystem."))
            if is_ours and getattr(module, "os", None) is os:
                module.os = self  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return self._others.get(name) or getattr(os, name)


def _no_file_sync() -> None:
    def skip_files(fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.fsync(fd)

    _OtherOs(fsync=skip_files, fdatasync=skip_files)


def _no_write_errors() -> None:
    """Writes always report success."""

    def lying(name: str) -> Callable[..., int]:
        def write(fd: int, data: Any, *rest: Any) -> int:
            pieces = data if name in ("writev", "pwritev") else [data]
            with contextlib.suppress(OSError):
                getattr(os, name)(fd, data, *rest)
            return sum(memoryview(piece).nbytes for piece in pieces)

        return write

    _OtherOs(**{name: lying(name) for name in WRITES})


def _no_odd_errors() -> None:
    """For a malformed value in a checkpoint the decoder expects a KeyError only."""
    decoding.MALFORMED = (KeyError,)  # type: ignore[assignment]


def _no_temporary() -> None:
    """The files of a save are written to their final directory at once."""

    def early(folder: Path, snapshot: Snapshot, *_: Any) -> Files:
        final = folder.parent.parent / folder.name
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        return write_state(final, snapshot)

    def describe_early(store: Store, folder: Path, files: Files, snapshot: Snapshot) -> None:
        describe(store, folder.parent.parent / folder.name, files, snapshot)

    describe = Store._describe
    writing.write_state = early  # type: ignore[assignment]
    Store._describe = describe_early  # type: ignore[method-assign]
    Workspace.put_in_place = (  # type: ignore[method-assign]
        lambda workspace, temporary, final: shutil.rmtree(temporary)
    )


def _no_wait_for_ranks() -> None:
    """A rank reports its files as written before they are."""
    late: dict[Path, bytes] = {}
    commit = Store.commit

    def early(folder: Path, snapshot: Snapshot, rank: int = 0, *shared: Any) -> Files:
        files = write_state(folder, snapshot, rank, *shared)
        for path in (folder / name for name in files if rank):
            late[folder.parent.parent / folder.name / path.name] = path.read_bytes()
            path.unlink()
        return files

    def commit_late(store: Store, snapshot: Snapshot) -> Path:
        final = commit(store, snapshot)
        for path, content in late.items():
            path.write_bytes(content)
        late.clear()
        return final

    writing.write_state = early  # type: ignore[assignment]
    Store.commit = commit_late  # type: ignore[method-assign]


def _removed_before_replaced() -> None:
    def put_in_place(workspace: Workspace, temporary: Path, final: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        durable.sync_directory(final.parent)

    Workspace.put_in_place = put_in_place  # type: ignore[method-assign]


def _no_put_back() -> None:
    """If the final rename fails, the old checkpoint is not restored."""

    def put_in_place(workspace: Workspace, temporary: Path, final: Path) -> None:
        aside = workspace._path / f"replaced_{final.name}"
        if os.path.lexists(final):
            os.rename(final, aside)
        os.rename(temporary, final)
        durable.sync_directory(final.parent)
        shutil.rmtree(aside, ignore_errors=True)

    Workspace.put_in_place = put_in_place  # type: ignore[method-assign]


def _removed_without_rename() -> None:
    def remove(remover: Remover, path: Path, work: Path) -> bool:
        shutil.rmtree(path)
        return True

    Remover.take = remove  # type: ignore[method-assign]
    Remover.discard = remove  # type: ignore[method-assign,assignment]


def _no_way_back() -> None:
    """The next attempt deletes checkpoints that an older attempt had moved aside."""
    Remover._belongs_back = lambda *args: False  # type: ignore[method-assign]


def _no_sync_before_deleting() -> None:
    """A power cut can undo the rename that precedes a deletion."""
    removal.durable = types.SimpleNamespace(  # type: ignore[assignment]
        sync_directory=lambda path: None
    )


def _no_clean_up() -> None:
    Workspace._take_over = lambda workspace: None  # type: ignore[method-assign]


def _no_takeover() -> None:
    """The token is checked, but the work directories of older attempts are left in place."""
    take_over = Workspace._take_over

    def only_own(workspace: Workspace) -> None:
        is_checker = "SLURM_JOB_ID" not in os.environ  # the checker has to clean up
        if is_checker or not any(workspace._directory.glob(".work_*")):
            take_over(workspace)

    Workspace._take_over = only_own  # type: ignore[method-assign]


def _no_checksums() -> None:
    CheckedFile._check = lambda file, number, found: None  # type: ignore[method-assign]


def _no_fence() -> None:
    Fence.check = lambda fence: False  # type: ignore[method-assign]


WAYS: dict[str, Callable[[], None]] = {
    name.lstrip("_"): way
    for name, way in list(globals().items())
    if getattr(way, "__module__", "") == __name__ and name.startswith(("_no", "_removed"))
}

RARE = {"no_way_back": 6, "removed_before_replaced": 4, "no_wait_for_ranks": 4}
"""Factor for the share of points tried with a patch, since few kills hit between the two calls."""

FOUND_BY = {
    "no_put_back": "errors",
    "no_temporary": "kills",
    "removed_before_replaced": "kills",
    "removed_without_rename": "kills",
    "no_way_back": "kills",
    "no_clean_up": "kills",
    "no_directory_sync": "power",
    "no_file_sync": "power",
    "no_sync_before_deleting": "power",
    "no_fence": "zombies",
    "no_takeover": "zombies",
    "no_checksums": "damage",
    "no_write_errors": "full",
    "no_odd_errors": "fuzz",
    "no_wait_for_ranks": "ranks",
}
