"""The demo's terminal: the launcher's display, with the demo's own lines in between.

The launcher writes to a pseudo-terminal as wide as ours, and its output is passed on unchanged.
Each time it redraws its table, it first moves up and erases: there the demo inserts its own lines,
as the launcher does. If the output is a pipe or a file, there is no table, only lines.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Sequence
from pathlib import Path

COLOURS = {"bad": "31", "good": "32", "note": "33", "dim": "2", "bold": "1"}
INDENT = 10
POLL_S, PATIENCE_S = 0.1, 5.0
# How rich begins to redraw; the rest of the output is the new table.
ERASE = re.compile(rb"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*(?!\x1b\[1A|\r|$)")
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


def clock(seconds: float) -> str:
    """Minutes and seconds: `1:07`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def paint(text: str, style: str) -> str:
    """`text` in a colour, if the output is a terminal and NO_COLOR is not set."""
    if not style or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[style]}m{text}\x1b[0m"


class Screen:
    """Passes on the launcher's output; `tell` adds lines to it."""

    def __init__(self) -> None:
        self.t0 = time.time()
        self._is_terminal = sys.stdout.isatty()
        self._source = -1
        self._has_table = False
        self._size = (0, 0)
        self._waiting: list[str] = []

    def start(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Run a command, and show its output here."""
        self.drain()
        if self._is_terminal:
            self._source, theirs = os.openpty()
            tty.setraw(theirs)  # what is passed on twice must not be translated twice
        else:
            self._source, theirs = os.pipe()
        self._size = (0, 0)
        self._fit()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,  # Ctrl+C at the terminal reaches only the demo
        )
        os.close(theirs)
        return process

    def tell(self, label: str, text: str, style: str = "") -> None:
        """One event; without a label it belongs to the event before."""
        head = f"{clock(time.time() - self.t0):>6}  " if label else " " * 8
        width = max(40, shutil.get_terminal_size((100, 24)).columns - INDENT - 1)
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        if not label:
            lines = [paint(line, style) for line in lines]
        joint = "\n" + " " * INDENT
        self._waiting.append(
            f"{paint(head, 'dim')}{paint(f'{label:<2}', style)}{joint.join(lines)}\n"
        )
        if not self._has_table:
            self._write(b"")

    @property
    def is_told(self) -> bool:
        """Whether every event is on the screen; new ones wait for the next redrawing."""
        return not self._waiting

    def pump(self, timeout_s: float) -> bool:
        """Pass on output that arrives in this time; False once the command closed its output."""
        self._fit()
        if self._source < 0:
            return False
        if not select.select([self._source], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._source, 1 << 16)
        except OSError:  # a pseudo-terminal ends like this
            data = b""
        if data:
            self._pass_on(data)
            return True
        os.close(self._source)
        self._source = -1
        if self._has_table:  # the launcher was killed: keep its table, show the cursor
            self._has_table = False
            os.write(1, b"\n" + SHOW_CURSOR)
        self._write(b"")
        return False

    def drain(self) -> None:
        """Pass on the rest of the newest command's output."""
        until = time.monotonic() + PATIENCE_S
        while self.pump(POLL_S) and time.monotonic() < until:
            pass

    def _pass_on(self, data: bytes) -> None:
        erased = ERASE.search(data)
        if self._has_table and self._waiting and erased:
            os.write(1, data[: erased.end()])
            self._write(data[erased.end() :])
        elif self._has_table:
            os.write(1, data)
        else:
            self._write(data)
        ends = (data.rfind(HIDE_CURSOR), data.rfind(SHOW_CURSOR))
        if ends != (-1, -1):
            self._has_table = ends[0] > ends[1]

    def _write(self, data: bytes) -> None:
        """Write the events, then the launcher's output."""
        sys.stdout.flush()
        told, self._waiting = "".join(self._waiting), []
        os.write(1, told.encode(sys.stdout.encoding, "replace") + data)

    def _fit(self) -> None:
        """Keep the launcher's terminal as large as ours."""
        size = shutil.get_terminal_size()
        if self._is_terminal and self._source >= 0 and size != self._size:
            self._size = (size.columns, size.lines)
            packed = struct.pack("HHHH", size.lines, size.columns, 0, 0)
            fcntl.ioctl(self._source, termios.TIOCSWINSZ, packed)
