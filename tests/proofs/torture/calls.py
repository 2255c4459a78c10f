"""Every call below one directory that reaches the operating system, seen and decided on in Python.

`Interception` puts itself before the functions of `os` (and `open`, `fcntl`, what pathlib keeps
for itself), in every thread. Calls that touch nothing below `root` pass unseen. Every other one
becomes a `Call`, and a hook decides: make it, make half of it, fail, block, die.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import itertools
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

WRITES = ("write", "pwrite", "writev", "pwritev")
READS = ("read", "pread", "readv", "preadv")
NAMES = ("rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "rmdir")
SIZES = ("truncate", "ftruncate", "posix_fallocate")
SYNCS = ("fsync", "fdatasync")
LOOKS = ("listdir", "scandir", "stat", "lstat", "fstat", "readlink")
CHANGES = (*WRITES, *NAMES, *SIZES, *SYNCS, "create", "lockf", "fcntl")
"""Calls between which a kill can make a difference."""

_TWO_PATHS = ("rename", "replace", "link")
_BY_FD = (*WRITES, *READS, *SYNCS, "ftruncate", "posix_fallocate", "fstat", "close")


class Call:
    """One call that is about to be made."""

    def __init__(self, number: int, name: str, real: Callable[..., Any], args: Any, options: Any):
        self.number = number
        self.name = name
        self.args, self.options = args, options
        self.path, self.second_path = "", ""
        self.handle = -1
        """Number of the `open` that made its descriptor: descriptors are used again."""
        self._real = real

    def make(self) -> Any:
        """Let it happen."""
        return self._real(*self.args, **self.options)

    def make_half(self) -> Any:
        """A read or write that stops in the middle, as the system may at any time."""
        fd, data, *rest = self.args
        if self.name == "read":
            return self._real(fd, max(1, data // 2) if data < 1 << 16 else 100)
        if self.name in ("write", "pwrite", "pread"):
            half = _half(data if self.name == "pread" else len(data))
            return self._real(fd, half if self.name == "pread" else data[:half], *rest)
        return self._real(fd, [memoryview(data[0]).cast("B")[: _half(len(data[0]))]], *rest)

    @property
    def is_halvable(self) -> bool:
        """Whether half of it is something else than all or nothing."""
        if self.name == "read":
            return self.args[1] > 1
        if self.name not in (*WRITES, *READS):
            return False
        data = self.args[1]
        return (data if self.name == "pread" else len(data[0] if "v" in self.name else data)) > 1

    @property
    def data(self) -> bytes:
        """What it writes."""
        pieces = self.args[1] if self.name in ("writev", "pwritev") else [self.args[1]]
        return b"".join(bytes(piece) for piece in pieces)

    def __str__(self) -> str:
        where = os.path.basename(self.path)
        return f"{self.name} {where}" + (
            f" -> {os.path.basename(self.second_path)}" if self.second_path else ""
        )


def _half(size: int) -> int:
    return size // 2 // 4096 * 4096 if size >= 8192 else max(1, size // 2)  # O_DIRECT: blocks


Hook = Callable[[Call], Any]


class Interception:
    """`with Interception(root, hook, names):` hands each call of `names` below `root` to `hook`."""

    def __init__(self, root: os.PathLike[str] | str, hook: Hook, names: tuple[str, ...] = CHANGES):
        self.root = os.path.realpath(root)
        self._hook = hook
        self._names = names
        self._numbers = itertools.count()
        self._opens = itertools.count()
        self._paths: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._real: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Interception:
        for name in {*WRITES, *READS, *NAMES, *SIZES, *SYNCS, *LOOKS, "close"}:
            if hasattr(os, name):
                self._put(os, name, self._wrapped(name, getattr(os, name)))
        self._put(os, "open", self._opening(os.open))
        for name in ("lockf", "fcntl"):
            self._put(fcntl, name, self._wrapped(name, getattr(fcntl, name)))
        opening = self._open_file(io.open)
        self._put(io, "open", opening)
        self._put(builtins, "open", opening)
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps what it found
        for name in (*NAMES, *LOOKS, "open"):
            if accessor is not None and name in vars(accessor):
                self._put(accessor, name, staticmethod(getattr(io if name == "open" else os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, real in reversed(self._real):
            setattr(owner, name, real)
        self._real.clear()

    def _put(self, owner: Any, name: str, new: Any) -> None:
        self._real.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def path_of(self, path: Any, dir_fd: int | None = None) -> str:
        """The absolute path below root, or nothing."""
        if isinstance(path, int):
            return self._paths.get(path, ("", -1))[0]
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(self._paths.get(dir_fd, ("", -1))[0], text)
        text = os.path.abspath(text)
        return text if text == self.root or text.startswith(f"{self.root}/") else ""

    def _decide(self, call: Call) -> Any:
        """Hand it to the hook, unless the hook itself makes it."""
        if call.name not in self._names or getattr(self._inside, "is_deciding", False):
            return call.make()
        self._inside.is_deciding = True
        try:
            with self._lock:
                call.number = next(self._numbers)
            return self._hook(call)
        finally:
            self._inside.is_deciding = False

    def _wrapped(self, name: str, real: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            call = Call(-1, name, real, args, options)
            if name in _BY_FD or name in ("lockf", "fcntl"):
                fd = args[0] if isinstance(args[0], int) else args[0].fileno()
                call.path, call.handle = self._paths.get(fd, ("", -1))
                if name == "close":
                    self._paths.pop(fd, None)
            elif name in _TWO_PATHS:
                call.path = self.path_of(args[0], options.get("src_dir_fd"))
                call.second_path = self.path_of(args[1], options.get("dst_dir_fd"))
            elif name == "symlink":
                call.path = self.path_of(args[1], options.get("dir_fd"))
            else:
                where = args[0] if args else options.get("path", ".")
                call.path = self.path_of(where, options.get("dir_fd"))
                if isinstance(where, int):
                    call.handle = self._paths.get(where, ("", -1))[1]
            return self._decide(call) if call.path else real(*args, **options)

        return wrapped

    def _opening(self, real: Any) -> Any:
        def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            full = self.path_of(path, dir_fd)
            if not full:
                return real(path, flags, mode, dir_fd=dir_fd)
            is_creating = flags & (os.O_CREAT | os.O_TRUNC)
            call = Call(-1, "create" if is_creating else "open", real, (path, flags, mode), {})
            call.options["dir_fd"] = dir_fd
            call.path, call.handle = full, next(self._opens)
            fd = self._decide(call)
            self._paths[fd] = (full, call.handle)
            return fd

        return opening

    def _open_file(self, real: Any) -> Any:
        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            is_plain = set(mode) <= set("rwxbt") and not options.get("opener")
            if isinstance(file, int) or not is_plain or not self.path_of(file):
                return real(file, mode, *args, **options)
            kinds = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}
            kinds["x"] = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            raw = _Raw(os.open(file, kinds[mode[0]] | os.O_CLOEXEC, 0o666), mode[0] == "r")
            buffered = io.BufferedReader(raw) if mode[0] == "r" else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        return open_file


class _Raw(io.RawIOBase):
    """A file whose every call goes through `os`, as io.FileIO's do not."""

    def __init__(self, fd: int, is_reading: bool) -> None:
        self._fd, self._is_reading = fd, is_reading

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return self._is_reading

    def writable(self) -> bool:
        return not self._is_reading

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._fd, [buffer])

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)
