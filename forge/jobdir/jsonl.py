"""Files of JSON lines, read from their end: the ledger of three weeks has hundreds of megabytes.

A line that a crash tore is skipped, and so is a line that is not an object with a `kind`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.filesystem.files import make_directory, open_file

Event = dict[str, Any]
_FIRST = 20
"""Events of the head of a file: lines of any length, since the start of a Run has all metrics."""
_CHUNK = 1 << 14
_MOST = 1 << 26
"""Bytes of the end of a file in which `tail` looks for the mark, at most."""


def parse(line: bytes) -> Event | None:
    """The event of a line, or None."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if _is_event(event) else None


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kind"), str)


def append(path: Path, kind: str, **values: Any) -> None:
    """Add an event, with the time, in one write.

    Raises:
        OSError: If it cannot be written.
    """
    line = json.dumps({"t": round(time.time(), 3), "kind": kind, **values}) + "\n"
    make_directory(path.parent)
    fd = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def events(path: Path) -> Iterator[Event]:
    """All events of a file, the oldest first; none if it does not exist."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        for line in file:
            event = parse(line)
            if event is not None:
                yield event


def head(path: Path) -> Iterator[Event]:
    """The first events of a file, decoded one by one; none if it does not exist."""
    return itertools.islice(events(path), _FIRST)


def tail(path: Path, mark: bytes) -> tuple[list[Event], bool]:
    """The events from the last line with a mark on; without such a line, the last events.

    Args:
        path: The file.
        mark: Bytes that only such a line has.
    Returns:
        The events, the oldest first, and whether they are all since the mark, or all there are.
    Raises:
        OSError: If the file cannot be read.
    """
    with os.fdopen(open_file(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        content, size = b"", _CHUNK
        last = b""
        while len(content) < min(end, _MOST):
            begin = max(end - size, 0)
            file.seek(begin)
            content = file.read(end - begin)
            last = last or content
            place = content.rfind(mark)
            start = content.rfind(b"\n", 0, place) + 1 if place >= 0 else 0
            if place >= 0 and (start > 0 or begin == 0):
                return _parsed(content[start:]), True
            if begin == 0 and size == _CHUNK:
                return _parsed(content), True
            size *= 4
    return _parsed(last), False


def _parsed(content: bytes) -> list[Event]:
    lines = list(filter(None, content.split(b"\n")))
    try:
        found = json.loads(b"[%s]" % b",".join(lines))  # a quarter of the time of one by one
        if len(found) == len(lines):
            return [one for one in found if _is_event(one)]
    except ValueError:
        pass  # one of them is torn
    return [one for one in map(parse, lines) if one is not None]
