"""Ways to break what forge promises: each has to make the suite fail, or it would check nothing."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.checkpoint import durable, tensorfile
from forge.checkpoint.fence import Fence
from forge.checkpoint.store import Store
from forge.checkpoint.workspace import Workspace


def _nothing() -> None:
    """Forge as it is."""


def _no_directory_sync() -> None:
    durable.sync_directory = lambda path: None


class _WithoutFileSync:
    """`os`, as a module of forge sees it that has forgotten to sync files."""

    def __getattr__(self, name: str) -> Any:
        return _skip_files if name in ("fsync", "fdatasync") else getattr(os, name)


def _skip_files(fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.fsync(fd)


def _no_file_sync() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("forge.checkpoint.") and getattr(module, "os", None) is os:
            module.os = _WithoutFileSync()  # type: ignore[attr-defined]


def _no_temporary() -> None:
    """The files of a save are written where they stay."""

    def early(store: Store, directory: Path, snapshot: Any) -> None:
        final = store.directory / f"step_{snapshot.step}"
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        write(store, final, snapshot)

    write = Store._write
    Store._write = early  # type: ignore[method-assign]
    Workspace.put_in_place = (  # type: ignore[method-assign]
        lambda workspace, temporary, final: shutil.rmtree(temporary)
    )


def _removed_before_replaced() -> None:
    def put_in_place(workspace: Workspace, temporary: Path, final: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        durable.sync_directory(final.parent)

    Workspace.put_in_place = put_in_place  # type: ignore[method-assign]


def _removed_without_rename() -> None:
    Workspace.remove = lambda workspace, path: shutil.rmtree(path)  # type: ignore[method-assign]


def _no_clean_up() -> None:
    Workspace._take_over = lambda workspace: None  # type: ignore[method-assign]


def _no_takeover() -> None:
    """The token is checked, but nobody's work directory is taken away."""
    take_over = Workspace._take_over

    def only_own(workspace: Workspace) -> None:
        if not any(workspace._directory.glob(".work_*")):
            take_over(workspace)

    Workspace._take_over = only_own  # type: ignore[method-assign]


def _no_checksums() -> None:
    read_bytes = tensorfile.read_bytes

    def unchecked(path: Path, entry: dict[str, Any], is_checked: bool) -> Any:
        return read_bytes(path, entry, False)

    tensorfile.read_bytes = unchecked


def _no_fence() -> None:
    Fence.check = lambda fence: False  # type: ignore[method-assign]


WAYS: dict[str, Callable[[], None]] = {
    name.lstrip("_"): way
    for name, way in list(globals().items())
    if getattr(way, "__module__", "") == __name__ and name.startswith(("_no", "_removed"))
}

FOUND_BY = {
    "no_temporary": "kills",
    "removed_before_replaced": "kills",
    "removed_without_rename": "kills",
    "no_clean_up": "kills",
    "no_directory_sync": "power",
    "no_file_sync": "power",
    "no_fence": "zombies",
    "no_takeover": "zombies",
    "no_checksums": "damage",
}
