"""A disk as unkind as POSIX allows: what was not synced is dropped, kept or torn by a power cut.

A run is recorded with the data of its calls, and those before a cut are replayed: data of a file
that no fsync followed may be missing, zeros or a part; a name that no fsync of its directory
followed may be missing or there, whatever became of those before and after it. Only one rename is
one thing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.calls import SYNCS, WRITES, Call


@dataclass
class Change:
    """One change to the disk: of names (`add`, `move`, `drop`) or of data (`data`, `size`)."""

    kind: str
    node: int
    directories: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    offset: int = 0
    content: bytes = b""
    synced_at: int = 1 << 60
    """The place in the recording after which no power cut can undo it."""


class Recorder:
    """Hook of an Interception: notes every change, and from where on it is durable."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.changes: list[Change] = []
        self.completed: list[int] = []
        """For each operation, the number of changes when it had returned."""
        self._lock = threading.RLock()
        self._parents: dict[str, int] = {root: 0}
        self._handles: dict[int, int] = {}
        self._num_nodes = 0
        self.kinds: dict[int, str] = {}

    def __call__(self, call: Call) -> Any:
        name = call.name
        if name in WRITES:  # in parallel; durable are those that returned before a sync began
            offset = call.args[2] if name.startswith("p") else os.lseek(call.args[0], 0, 1)
            count = call.make()
            with self._lock:
                node = self._handles[call.handle]
                self.changes.append(Change("data", node, offset=offset, content=call.data[:count]))
            return count
        if name in SYNCS:
            with self._lock:
                place = len(self.changes)
            result = call.make()
            with self._lock:
                self._sync(call, place)
            return result
        with self._lock:
            was_there = os.path.lexists(call.path)
            result = call.make()
            self._note_names(call, was_there, result)
            return result

    def forget_locks(self) -> None:
        """So that it can be handed from process to process."""
        del self._lock

    def _sync(self, call: Call, place: int) -> None:
        node = self._handles[call.handle]
        self.changes.append(Change("sync", node))
        for change in self.changes[:place]:
            if (change.node == node and change.kind in ("data", "size")) or (
                node in change.directories
            ):
                change.synced_at = min(change.synced_at, len(self.changes))

    def _new(self, path: str, kind: str, content: bytes = b"") -> int:
        self._num_nodes += 1
        node = self._num_nodes
        self.kinds[node] = kind
        self._parents[path] = node
        directory, name = os.path.split(path)
        self.changes.append(
            Change("add", node, (self._parents[directory],), (name,), content=content)
        )
        return node

    def _note_names(self, call: Call, was_there: bool, result: Any) -> None:
        path, name = call.path, call.name
        directory, base = os.path.split(path)
        if name in ("create", "open"):
            if name == "create" and not was_there:
                self._new(path, "file")
            elif name == "create" and call.args[1] & os.O_TRUNC:
                self.changes.append(Change("size", self._parents[path], offset=0))
            if path in self._parents:
                self._handles[call.handle] = self._parents[path]
        elif name == "mkdir":
            self._new(path, "directory")
        elif name == "symlink":
            self._new(path, "link", os.fsencode(call.args[0]))
        elif name in ("rename", "replace"):
            node = self._parents[path]
            target, new = os.path.split(call.second_path)
            ends = (self._parents[directory], self._parents[target])
            self.changes.append(Change("move", node, ends, (base, new)))
            self._forget(call.second_path)
            for old in [p for p in self._parents if p == path or p.startswith(f"{path}/")]:
                self._parents[call.second_path + old[len(path) :]] = self._parents.pop(old)
        elif name in ("unlink", "remove", "rmdir"):
            self.changes.append(
                Change("drop", self._parents[path], (self._parents[directory],), (base,))
            )
            self._forget(path)
        elif name in ("ftruncate", "posix_fallocate"):
            size = call.args[1] if name == "ftruncate" else -(call.args[1] + call.args[2])
            self.changes.append(Change("size", self._handles[call.handle], offset=size))
        elif name not in ("lockf", "fcntl"):
            raise AssertionError(f"the model of a disk knows no {name}")

    def _forget(self, path: str) -> None:
        for old in [p for p in self._parents if p == path or p.startswith(f"{path}/")]:
            del self._parents[old]


Entries = dict[tuple[int, str], int]
Keep = Callable[[int], str]
"""Of a change that is not synced, by its number: `keep`, `lose`, `zero` or `tear`."""


def replay(recorder: Recorder, place: int, keep: Keep) -> tuple[Entries, dict[int, bytearray]]:
    """The disk after a power cut at `place`: names, and data by node."""
    entries: Entries = {}
    data: dict[int, bytearray] = {}
    for number, change in enumerate(recorder.changes[:place]):
        fate = "keep" if change.synced_at <= place else keep(number)
        node = change.node
        if change.kind in ("data", "size"):
            _replay_data(data.setdefault(node, bytearray()), change, fate)
            continue
        if change.kind == "add" and recorder.kinds[node] == "link":
            data[node] = bytearray(change.content)
        if fate == "lose" or change.kind == "sync":
            continue
        first = (change.directories[0], change.names[0])
        if change.kind == "add":
            entries[first] = node
        elif change.kind == "move":
            for key in [key for key, value in entries.items() if value == node]:
                del entries[key]
            entries[change.directories[1], change.names[1]] = node
        elif entries.get(first) == node and not any(d == node for d, _ in entries):
            del entries[first]
    return entries, data


def _replay_data(content: bytearray, change: Change, fate: str) -> None:
    if change.kind == "size":
        size = change.offset
        if fate == "keep" and size >= 0:
            del content[size:]
            content.extend(bytes(size - len(content)))
        elif fate == "keep":
            content.extend(bytes(max(0, -size - len(content))))
        return
    if fate == "lose":
        return
    piece = change.content
    if fate == "tear":
        piece = piece[: len(piece) // 2]
    end = change.offset + len(piece)
    content.extend(bytes(max(0, end - len(content))))
    content[change.offset : end] = bytes(len(piece)) if fate == "zero" else piece


def tree_of(recorder: Recorder, disk: tuple[Entries, dict[int, bytearray]]) -> dict[str, Any]:
    """Path -> None for a directory, ("link", target), or the content."""
    entries, data = disk
    found: dict[str, Any] = {}

    def walk(directory: int, path: str) -> None:
        for (parent, name), node in entries.items():
            if parent == directory:
                kind, here = recorder.kinds[node], f"{path}/{name}"
                content = bytes(data.get(node, b""))
                found[here] = {"file": content, "link": ("link", content)}.get(kind)
                if kind == "directory":
                    walk(node, here)

    walk(0, "")
    return found


def build(tree: dict[str, Any], parent: Path) -> None:
    for name, content in sorted(tree.items()):
        path = parent / name[1:]
        if content is None:
            path.mkdir()
        elif isinstance(content, tuple):
            path.symlink_to(os.fsdecode(content[1]))
        else:
            path.write_bytes(content)


def real_tree(parent: Path) -> dict[str, Any]:
    """As `tree_of`, of a directory that is there."""
    found: dict[str, Any] = {}
    for path in parent.rglob("*"):
        is_file = path.is_file() and not path.is_symlink()
        content = path.read_bytes() if is_file else None
        link = ("link", os.fsencode(os.readlink(path))) if path.is_symlink() else None
        found[f"/{path.relative_to(parent)}"] = link or content
    return found
