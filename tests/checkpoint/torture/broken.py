"""Ways to break what forge promises: each has to make the suite fail, or it would check nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.checkpoint import durable, tensorfile
from forge.checkpoint.fence import Fence
from forge.checkpoint.store import Store


def _nothing() -> None:
    """Forge as it is."""


def _no_directory_sync() -> None:
    durable.sync_directory = lambda path: None


def _no_file_sync() -> None:
    os.fsync = os.fdatasync = lambda fd: None


def _no_temporary() -> None:
    """The files of a save are written where they stay."""
    put_in_place = Store._put_in_place

    def early(store: Store, directory: Path, snapshot: Any) -> None:
        final = store.directory / f"step_{snapshot.step}"
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        write(store, final, snapshot)

    write = Store._write
    Store._write = early  # type: ignore[method-assign]
    Store._put_in_place = lambda store, temporary, final: shutil.rmtree(temporary)  # type: ignore
    del put_in_place


def _removed_before_replaced() -> None:
    def put_in_place(store: Store, temporary: Path, final: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)

    Store._put_in_place = put_in_place  # type: ignore[method-assign]


def _removed_without_rename() -> None:
    Store._remove_step = lambda store, path: shutil.rmtree(path)  # type: ignore[method-assign]


def _no_clean_up() -> None:
    Store._clean_up = lambda store: None  # type: ignore[method-assign]


def _no_checksums() -> None:
    read_bytes = tensorfile.read_bytes

    def unchecked(path: Path, entry: dict[str, Any], is_checked: bool) -> Any:
        return read_bytes(path, entry, False)

    tensorfile.read_bytes = unchecked


def _no_fence() -> None:
    Fence.check = lambda fence: None  # type: ignore[method-assign]


WAYS: dict[str, Callable[[], None]] = {
    name.lstrip("_"): way
    for name, way in list(globals().items())
    if getattr(way, "__module__", "") == __name__ and name.startswith("_")
}
