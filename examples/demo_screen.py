"""What the demo shows while it runs: events that scroll by, and two progress bars below them."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time

COLOURS = {"bad": "31", "good": "32", "note": "33", "bar": "36", "dim": "2", "bold": "1"}
REDRAW_S = 0.1
BAR_WIDTH = 32
INDENT = 21


def clock(seconds: float) -> str:
    """Minutes and seconds: `1:07`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def paint(text: str, style: str) -> str:
    """`text` in a colour, where somebody sees it and did not ask for none."""
    if not style or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[style]}m{text}\x1b[0m"


class Screen:
    """A terminal keeps the bars at its bottom; a file or a pipe gets a line per quarter."""

    def __init__(self) -> None:
        self.t0 = time.time()
        self._is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_unicode = "utf" in (sys.stdout.encoding or "").lower()
        self._num_bars = 0
        self._next_redraw = 0.0
        self._quarters: dict[str, int] = {}
        self._bars: list[str] = []

    def tell(self, label: str, text: str, style: str = "") -> None:
        """One event, above the bars; without a label it belongs to the event before."""
        self._erase()
        head = f"{clock(time.time() - self.t0):>6}  " if label else " " * 8
        width = max(40, shutil.get_terminal_size((100, 24)).columns - INDENT - 1)
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        if not label:
            lines = [paint(line, style) for line in lines]
        joint = "\n" + " " * INDENT
        print(f"{paint(head, 'dim')}{paint(f'{label:<13}', style)}{joint.join(lines)}", flush=True)
        self._draw()

    def is_due(self) -> bool:
        """Whether it is time for `show` again."""
        return time.monotonic() >= self._next_redraw

    def show(self, runs: list[tuple[str, int, int, str]]) -> None:
        """Progress of every run: (name, steps done, steps in total, remark)."""
        self._next_redraw = time.monotonic() + REDRAW_S
        if not self._is_live:
            for name, step, steps, remark in runs:
                quarter = 4 * step // steps
                if quarter > self._quarters.get(name, 0):
                    self._quarters[name] = quarter
                    self.tell(name, f"step {step} of {steps}{f', {remark}' if remark else ''}")
        else:
            width = shutil.get_terminal_size().columns - 1
            self._erase()
            self._bars = [self._bar(*run, width) for run in runs]
            self._draw()

    def close(self) -> None:
        """Take the bars away; what follows is printed as usual."""
        self._erase()
        self._bars = []

    def _bar(self, name: str, step: int, steps: int, remark: str, width: int) -> str:
        full, empty = "━─" if self._is_unicode else "#-"
        done = BAR_WIDTH * step // steps
        head, tail = f"        {name:<13}", f" {step:>5} of {steps}  {remark}"
        tail = tail[: max(0, width - len(head) - BAR_WIDTH)]
        return head + paint(full * done, "bar") + paint(empty * (BAR_WIDTH - done), "dim") + tail

    def _erase(self) -> None:
        if self._num_bars:
            print(f"\x1b[{self._num_bars}F\x1b[J", end="", flush=True)
            self._num_bars = 0

    def _draw(self) -> None:
        if self._bars:
            # A blank line keeps the bars apart from the events.
            print("\n" + "\n".join(self._bars), flush=True)
            self._num_bars = len(self._bars) + 1
