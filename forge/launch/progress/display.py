"""The progress of a sweep: a live table on a terminal, plain lines anywhere else.

`Display.update` draws, in its caller's thread; nothing runs beside it. A reader who went away, or
does not read, holds nobody up: `_Stream` looks before it writes, and swallows what nobody can get.
rich is imported (20 to 45 ms) only where there is a table to draw.
"""

from __future__ import annotations

import logging
import math
import os
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TextIO, cast

from forge.launch.progress.table import (
    ACTIVE,
    STYLES,
    News,
    at,
    clock,
    escape,
    news,
    per_second,
    table,
    text,
)
from forge.launch.progress.view import JobView, State

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.segment import Segment

Mode = Literal["auto", "live", "plain"]

FRAME_S = 0.125  # least time between two drawings of the table
PATIENCE_S = 1.0  # so long the last words wait for a reader
# A plain line on a job's progress needs the first, and one of the others, since the last such line.
PROGRESS_S, PROGRESS_SHARE, SILENCE_S = 30.0, 0.1, 600.0

_RANKS = {**dict.fromkeys(ACTIVE, 0), State.failed: 1, State.stopped: 3}
_ASCII = str.maketrans("·…━─", "|~=-")


class Display:
    """Shows how the jobs of a sweep get on; a context manager.

    The table stays whole while other code of this process writes to the same terminal through
    `sys.stdout`, `sys.stderr` or a logging handler that holds either (Hydra's do, so handlers are
    pointed to the stand-ins until `close`): such lines appear above the table. What bypasses these
    objects is not covered: child processes that inherit the terminal, C code, `os.write`. A stream
    that leads elsewhere (`python train.py -m > log`) is left alone.

    Args:
        total: Jobs in the sweep, with those that have no view yet.
        n_jobs: Jobs that run at the same time.
        stream: Where to write; stderr by default, as stdout belongs to the jobs.
        mode: "auto" is "live" on a terminal that can move its cursor, outside of CI.
    """

    def __init__(
        self, total: int, n_jobs: int, stream: TextIO | None = None, mode: Mode = "auto"
    ) -> None:
        self._total, self._n_jobs = total, n_jobs
        self._stream = _Stream(sys.stderr if stream is None else stream)
        self._is_live = mode == "live" or (mode == "auto" and self._stream.can_be_live())
        self._live: Live | None = None
        self._moved: list[tuple[TextIO, TextIO]] = []
        self._views: Sequence[JobView] = ()
        self._last: dict[int, JobView] = {}
        self._told: dict[int, tuple[float, float]] = {}
        self._pending: deque[tuple[str, str]] = deque(maxlen=1000)
        self._turn = threading.Lock()
        self._began_s = time.monotonic()
        self._next_frame_s = self._job_s = 0.0
        self._frame: list[list[Segment]] = []
        self._columns, self._is_closed = 0, False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, views: Sequence[JobView]) -> None:
        """Show all jobs as they stand now; cheap enough to be called many times a second."""
        self._views, now = views, time.monotonic()
        for view in views:
            last = self._last.get(view.number)
            if view is not last:
                self._last[view.number] = view
                found = news(view, last) or self._progress(view, now)
                if found is not None and not (self._is_live and found.is_in_table):
                    self._pending.append((f"job {view.number}: {found.text}", STYLES[view.state]))
        self._show()

    @property
    def is_live(self) -> bool:
        """Whether there is a table."""
        return self._is_live

    def say(self, text: str, style: str = "") -> None:
        """Show a line, or several, that stay; `style` is rich's ("bold red"), markup is not."""
        self._pending.extend((escape(line), style) for line in text.split("\n"))
        self._show()

    def close(self) -> None:
        """Leave the last state on screen and the terminal in order; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        # Who paused the terminal sees nothing more of us: the sweep must be able to end.
        self._stream.is_gone |= not self._stream.is_ready(PATIENCE_S)
        if self._views and not self._is_live:
            self._pending.extend((line, "") for line in self._summary(10_000))
        try:
            self._show(is_last=True)
            if self._live is not None:
                self._live.stop()
        finally:  # also where one more Ctrl+C ended the drawing
            for own, stand_in in self._moved:
                sys.stdout = own if sys.stdout is stand_in else sys.stdout
                sys.stderr = own if sys.stderr is stand_in else sys.stderr
            _repoint([(stand_in, own) for own, stand_in in self._moved])
            self._stream.write("\x1b[?25h" if self._live is not None else "")

    def _progress(self, view: JobView, now: float) -> News | None:
        if self._is_live or view.state is not State.running or view.step is None:
            return None
        share = view.step / view.steps if view.steps else 0.0
        told_s, told = self._told.setdefault(view.number, (now, share))
        since_s = now - told_s
        if since_s < PROGRESS_S or (share - told < PROGRESS_SHARE and since_s < SILENCE_S):
            return None
        self._told[view.number] = (now, share)
        left = clock(view.left_s)
        facts = (at(view).strip(), per_second(view.rate), left and f"{left} left")
        return News(", ".join(filter(None, facts)))

    def _show(self, *, is_last: bool = False) -> None:
        # A signal handler or another thread may come in between: its lines wait for the next call.
        if (self._is_closed and not is_last) or not self._turn.acquire(blocking=False):
            return
        try:
            if self._is_live and self._live is None:
                self._start()
            while self._pending and self._stream.is_ready():
                line, style = self._pending.popleft()
                if self._live is None:
                    self._stream.write(line + "\n")
                else:
                    self._live.console.print(text((line, style)))
            now = time.monotonic()
            if self._live and (is_last or now >= self._next_frame_s) and self._stream.is_ready():
                self._draw(self._live)
                # Whatever a frame costs here, nine tenths of the time stay the launcher's.
                self._next_frame_s = now + max(FRAME_S, 10 * (time.monotonic() - now))
        finally:
            self._turn.release()

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=cast(TextIO, self._stream), force_terminal=True, soft_wrap=True)
        own = (sys.stdout, sys.stderr)
        out, err = map(self._stream.is_same_file, own)
        live = Live(console=console, auto_refresh=False, redirect_stdout=out, redirect_stderr=err)
        self._live = live
        self._live.start()
        pairs = zip(own, (sys.stdout, sys.stderr), strict=True)
        self._moved = [(own, stand_in) for own, stand_in in pairs if own is not stand_in]
        _repoint(self._moved)

    def _draw(self, live: Live) -> None:
        from rich.console import Group
        from rich.segment import Segment, SegmentLines

        columns, lines = live.console.size = self._stream.size()
        summary = self._summary(columns - 1)
        shown = self._chosen(lines - 2 - len(summary))
        parts: list[RenderableType] = [table(shown, columns - 1)] if shown else []
        if 0 < len(shown) < len(self._views):
            parts.append(text((f"… {len(self._views) - len(shown)} more", "dim")))
        parts.extend(text((line, "bold")) for line in summary)
        options = live.console.options.update(width=columns - 1)
        frame = live.console.render_lines(Group(*parts), options, pad=False)
        if columns < self._columns:  # the terminal has broken the lines that became too long
            lengths = map(Segment.get_line_length, self._frame)
            broken = sum(max(0, length - 1) // columns for length in lengths)
            self._stream.write("\r" + "\x1b[2K\x1b[1A" * broken)
        elif frame == self._frame:
            return
        self._frame, self._columns = frame, columns
        live.update(SegmentLines(frame, new_lines=True), refresh=True)

    def _chosen(self, room: int) -> list[JobView]:
        """The jobs that get a row: all, or those that something happens to."""
        if len(self._views) <= room:
            return list(self._views)
        is_news = {v.number for v in self._views if v.restarts and not v.state.is_final}
        notable = [v for v in self._views if v.state in _RANKS or v.number in is_news]
        notable.sort(key=lambda view: _RANKS.get(view.state, 2))
        return sorted(notable[: max(0, room - 1)], key=lambda view: view.number)

    def _summary(self, width: int) -> list[str]:
        counts = Counter(view.state for view in self._views)
        counts[State.queued] += self._total - len(self._views)
        done, failed = counts.pop(State.finished, 0), counts.pop(State.failed, 0)
        facts = [f"{done} of {self._total} finished" + (f", {failed} failed" if failed else "")]
        order = (State.running, State.starting, State.stopping, State.stopped, State.queued)
        facts += [f"{counts[state]} {state.value}" for state in order if counts[state]]
        reasons = Counter(view.waits_for for view in self._views if view.waits_for)
        if reasons:
            shown = (f"{count} {escape(reason)}" for reason, count in reasons.most_common(3))
            facts[-1] += f" ({', '.join(shown)}{', …' if len(reasons) > 3 else ''})"
        facts += [clock(time.monotonic() - self._began_s), self._estimate(counts[State.queued])]
        lines = facts[:1]
        for fact in filter(None, facts[1:]):
            if len(lines[-1]) + len(fact) + 3 <= width:
                lines[-1] += f" · {fact}"
            else:
                lines.append(fact)
        return lines

    def _estimate(self, num_queued: int) -> str:
        active = [view for view in self._views if view.state in ACTIVE]
        whole_s = [view.steps / view.rate for view in active if view.steps and view.rate]
        self._job_s = sum(whole_s) / len(whole_s) if whole_s else self._job_s
        lefts_s = [self._job_s if view.left_s is None else view.left_s for view in active]
        left_s = max([*lefts_s, (sum(lefts_s) + num_queued * self._job_s) / self._n_jobs])
        if not self._job_s or not math.isfinite(left_s) or not (active or num_queued):
            return ""
        minutes = math.ceil(left_s / 60)
        return f"about {minutes} min left" if minutes <= 90 else f"about {minutes // 60} h left"


class _Stream:
    """A stream that is no longer written to once it failed, so that no error reaches rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
        self._spare = {} if self.encoding.startswith("utf") else _ASCII
        self.is_gone = False

    def write(self, text: str) -> int:
        text = text.translate(self._spare).encode(self.encoding, "replace").decode(self.encoding)
        try:
            if text and not self.is_gone:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError, AttributeError):  # the reader left, or there is no stream
            self.is_gone = True
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def is_ready(self, patience_s: float = 0.0) -> bool:
        """Whether somebody reads, so that a line can be written without waiting."""
        try:
            return not self.is_gone and bool(select.select([], [self._stream], [], patience_s)[1])
        except (OSError, ValueError, TypeError):
            return True  # no file, or a closed one: nothing to wait for

    def is_same_file(self, other: TextIO) -> bool:
        try:
            return os.path.sameopenfile(self._stream.fileno(), other.fileno())
        except (AttributeError, OSError, ValueError):
            return False

    def can_be_live(self) -> bool:
        is_in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        is_dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
        try:
            return not (is_in_ci or is_dumb) and self._stream.isatty()
        except (AttributeError, ValueError):  # none, one of the user's own, or a closed one
            return False

    def size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            columns = lines = 0
        return columns or 80, lines or 24


def _repoint(pairs: Sequence[tuple[TextIO, TextIO]]) -> None:
    """Make logging handlers that hold the first of a pair write to the second."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):  # a placeholder has none
            new = next((new for old, new in pairs if old is getattr(handler, "stream", None)), None)
            if new is not None and isinstance(handler, logging.StreamHandler):
                handler.setStream(new)
