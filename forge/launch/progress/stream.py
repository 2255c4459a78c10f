"""The output of a display, which cannot block or end its launcher, and what it can show."""

from __future__ import annotations

import os
import select
from typing import TextIO


class Stream:
    """A stream that ignores writes after it has failed, so that no error reaches rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.is_gone = False

    def write(self, text: str) -> int:
        """Write a text, unless an earlier write has failed."""
        try:
            if not self.is_gone:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError, AttributeError):  # the reader left, or there is no stream
            self.is_gone = True
        return len(text)

    def flush(self) -> None:
        """Does nothing: `write` flushes."""

    def is_ready(self, patience_s: float = 0.0) -> bool:
        """Whether a line can be written without blocking."""
        try:
            return not self.is_gone and bool(select.select([], [self._stream], [], patience_s)[1])
        except (OSError, ValueError, TypeError):
            return True  # not a file, or closed: a write cannot block


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; False also for None, and for a closed stream."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # an object of the user's, or closed
        return False


def can_be_live(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor, outside of CI."""
    is_in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    is_dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return not (is_in_ci or is_dumb) and is_terminal(stream)
