"""The display of a sweep: a line for each event, and below them a live table on a terminal.

`Display.update` draws in its caller's thread; there is no background thread. A closed or full
output cannot block the launcher: `_Stream` checks before it writes, and drops output that cannot
be written. rich is imported (20 to 45 ms) only if there is a table to draw.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TextIO, cast

from forge.jobdir.job_state import State
from forge.launch.progress.table import ACTIVE, clock, news, table
from forge.launch.progress.view import JobView
from forge.messages import escape
from forge.sweeps.status import STYLES

if TYPE_CHECKING:
    from rich.live import Live

Mode = Literal["auto", "live", "plain", "none"]

FRAME_S = 0.125
"""Least number of seconds between two drawings of the table."""
SUMMARY_S = 600.0
"""Seconds between two summaries of all jobs, if there is no table."""
PATIENCE_S = 1.0
"""Seconds that the last lines wait for a reader."""
_ORDER = (
    *(State.running, State.starting, State.stopping),
    *(State.stopped, State.terminated, State.queued),
)


class Display:
    """Shows the progress of the jobs of a sweep; a context manager.

    Lines that other code of this process prints to the same terminal appear above the table. This
    does not cover output that bypasses `sys.stdout` and `sys.stderr`: logging handlers created
    before, child processes that inherit the terminal, C code, `os.write`.

    Args:
        stream: Where to write; stderr by default, as stdout belongs to the jobs.
        mode: "auto" is "live" on a terminal that can move its cursor, outside of CI.
    """

    def __init__(self, stream: TextIO | None = None, mode: Mode = "auto") -> None:
        stream = sys.stderr if stream is None else stream
        self._stream = _Stream(stream)
        self._is_silent = mode == "none"
        self.is_live = mode == "live" or (mode == "auto" and _can_be_live(stream))
        """Whether there is a table."""
        self._live: Live | None = None
        self._views: Sequence[JobView] = ()
        self._last: dict[int, JobView] = {}
        self._pending: deque[tuple[str, str]] = deque(maxlen=1000)
        self._began_s = self._summed_s = time.monotonic()
        self._next_frame_s = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, views: Sequence[JobView]) -> None:
        """Show the current state of all jobs; cheap enough to be called many times a second."""
        self._views = views
        for view in views:
            text = news(view, self._last.get(view.number))
            self._last[view.number] = view
            if text and (view.remark or view.hang or not self.is_live):  # else it is in the table
                self._note(f"job {view.number}: {text}", STYLES[view.state])
        if not self.is_live and time.monotonic() - self._summed_s >= SUMMARY_S:
            self._summarize()
        self._show()

    def say(self, text: str, style: str = "") -> None:
        """Print one or more lines; `style` is a rich style ("bold red"), markup is not parsed."""
        first, *below = text.split("\n")
        self._note(escape(first), style)
        self._pending.extend((escape(line), style) for line in below)
        self._show()

    def _note(self, line: str, style: str) -> None:
        """A line with the time of day, unless a table with its own clock is on the screen."""
        now = "" if self.is_live else time.strftime("%H:%M:%S ")
        self._pending.append((f"{now}{line}", style))

    def close(self) -> None:
        """Show the last state and restore the terminal; can be called again."""
        # A paused terminal gets no further output: the sweep must be able to end.
        self._stream.is_gone |= not self._stream.is_ready(PATIENCE_S)
        if self._views and not self.is_live:
            self._summarize()
        self._next_frame_s = 0.0
        try:
            self._show()
        finally:  # also if another Ctrl+C interrupted the drawing
            live, self._live, self._views = self._live, None, ()
            if live is not None:
                live.stop()

    def _summarize(self) -> None:
        self._summed_s = time.monotonic()
        self._note(self._summary(), "")

    def _show(self) -> None:
        if self._is_silent:
            return
        if self.is_live and self._live is None and self._views:
            self._start()
        while self._pending and self._stream.is_ready():
            line, style = self._pending.popleft()
            if self._live is None:
                self._stream.write(line + "\n")
            else:
                self._print(self._live, line, style)
        now = time.monotonic()
        if self._live and now >= self._next_frame_s and self._stream.is_ready():
            self._draw(self._live)
            # However slow a frame is, drawing takes at most a tenth of the time.
            self._next_frame_s = now + max(FRAME_S, 10 * (time.monotonic() - now))

    def _print(self, live: Live, line: str, style: str) -> None:
        from rich.text import Text

        live.console.print(Text(line, style, overflow="crop", no_wrap=True))

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=cast(TextIO, self._stream), force_terminal=True, soft_wrap=True)
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        self._live.start()

    def _draw(self, live: Live) -> None:
        from rich.console import Group, RenderableType
        from rich.text import Text

        summary = Text(self._summary(), "bold")
        shown = self._chosen(live.console.height - 4)
        parts: list[RenderableType] = [table(shown)] if shown else []
        if len(shown) < len(self._views):
            parts.append(Text(f"… {len(self._views) - len(shown)} more", "dim"))
        live.update(Group(*parts, summary), refresh=True)

    def _chosen(self, room: int) -> Sequence[JobView]:
        """The jobs that get a row: all, or as many running ones as fit."""
        if len(self._views) <= room:
            return self._views
        return [view for view in self._views if view.state in ACTIVE][: max(room, 0)]

    def _summary(self) -> str:
        counts = Counter(view.state for view in self._views)
        failed = f", {counts[State.failed]} failed" if counts[State.failed] else ""
        facts = [f"{counts[State.finished]} of {len(self._views)} finished{failed}"]
        facts += [f"{counts[state]} {state.value}" for state in _ORDER if counts[state]]
        reasons = Counter(view.waits_for for view in self._views if view.waits_for)
        if reasons:
            shown = (f"{count} {escape(reason)}" for reason, count in reasons.most_common(3))
            facts[-1] += f" ({', '.join(shown)}{', …' if len(reasons) > 3 else ''})"
        facts.append(clock(time.monotonic() - self._began_s))
        return " · ".join(facts)


class _Stream:
    """A stream that ignores writes after it has failed, so that no error reaches rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.is_gone = False

    def write(self, text: str) -> int:
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


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # an object of the user's, or closed
        return False


def _can_be_live(stream: TextIO) -> bool:
    is_in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    is_dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return not (is_in_ci or is_dumb) and _is_terminal(stream)
