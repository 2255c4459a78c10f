"""The display of a sweep: a line for each event, and below them a live table on a terminal.

`Display.update` draws in its caller's thread; there is no background thread. A closed or full
output cannot block the launcher: `Stream` checks before it writes, and drops output that cannot
be written. rich is imported (20 to 45 ms) only if there is a table to draw.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from forge.jobdir.job_state import State
from forge.launch.progress.news import news
from forge.messages import escape
from forge.sweeps import attempts, reader, render, status, words
from forge.sweeps.chosen_metric import Chosen
from forge.sweeps.job import SweepJob
from forge.sweeps.render import Line
from forge.sweeps.status import STYLES, JobRow
from forge.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from rich.live import Live


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
        title: The first line of the table.
    """

    def __init__(self, stream: TextIO | None = None, mode: str = "auto", title: str = "") -> None:
        stream = sys.stderr if stream is None else stream
        self._stream = Stream(stream)
        self._title = title
        self._is_silent = mode == "none"
        self.is_live = mode == "live" or (mode == "auto" and can_be_live(stream))
        """Whether there is a table."""
        self._live: Live | None = None
        self._jobs: Sequence[SweepJob] = ()
        self._last: dict[int, SweepJob] = {}
        self._pending: deque[tuple[str, str]] = deque(maxlen=1000)
        self._began_s = self._summed_s = time.monotonic()
        self._next_frame_s = 0.0
        self._totals: list[str] = []
        """Facts for the last summary."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, jobs: Sequence[SweepJob]) -> None:
        """Show the current state of all jobs; cheap enough to be called many times a second."""
        self._jobs = jobs
        for job in jobs:
            last, self._last[job.number] = self._last.get(job.number), job
            for text in news(job, last) if job is not last else ():
                if not self.is_live or status.problem_of(job):  # else it is in the table
                    self._note(f"job {job.number}: {text}", STYLES[job.state])
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
        if self._jobs and not self._is_silent:
            self._totals = _totals(self._jobs)
            if not self.is_live:
                self._summarize()
        self._next_frame_s = 0.0
        try:
            self._show()
        finally:  # also if another Ctrl+C interrupted the drawing
            live, self._live, self._jobs = self._live, None, ()
            if live is not None:
                live.stop()

    def _summarize(self) -> None:
        self._summed_s = time.monotonic()
        self._note(self._summary(), "")

    def _show(self) -> None:
        if self._is_silent:
            return
        if self.is_live and self._live is None and self._jobs:
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
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._live.start()

    def _draw(self, live: Live) -> None:
        from rich.console import Group
        from rich.text import Text

        lines = self._lines(live.console.width, live.console.height - 2)
        texts = (Text(one.text, one.style, overflow="ellipsis", no_wrap=True) for one in lines)
        live.update(Group(*texts), refresh=True)

    def _lines(self, width: int, room: int) -> list[Line]:
        """The title, a table of as many jobs as fit, with as many notes as fit, and the summary."""
        now, jobs = time.time(), self._jobs
        around = [
            render.wrapped(self._title, width, "bold") if self._title else [],
            render.wrapped(self._summary(), width, "bold"),
        ]
        room -= sum(map(len, around)) + 1
        if len(jobs) > room:
            jobs = [job for job in jobs if job.state.is_active][: max(room - 1, 0)]
        metric = Chosen().of_sweep(jobs)
        cells = [status.cells(job, metric, now) for job in jobs]
        rows: list[Line] = []
        for notes in (_notes, _problems, _no_notes):
            found = [
                JobRow(job, own, notes(job, now)) for job, own in zip(jobs, cells, strict=True)
            ]
            rows = list(render.rows(found, width)) if found else []
            if len(rows) <= room:
                break
        if len(jobs) < len(self._jobs):
            rows.append(Line(f"… {len(self._jobs) - len(jobs)} more", "dim"))
        return [*around[0], *rows, *around[1]]

    def _summary(self) -> str:
        counts = Counter(job.state for job in self._jobs)
        failed = f", {counts[State.failed]} failed" if counts[State.failed] else ""
        facts = [f"{counts[State.finished]} of {len(self._jobs)} finished{failed}"]
        facts += [f"{counts[state]} {state.value}" for state in _ORDER if counts[state]]
        reasons = Counter(job.waits_for for job in self._jobs if job.waits_for)
        if reasons:
            shown = (f"{count} {escape(reason)}" for reason, count in reasons.most_common(3))
            facts[-1] += f" ({', '.join(shown)}{', …' if len(reasons) > 3 else ''})"
        facts += [*self._totals, words.clock(time.monotonic() - self._began_s)]
        return " · ".join(facts)


def title(path: Path, jobs: Iterable[tuple[str, ...]]) -> str:
    """The first line of the table: the sweep's directory, and what all jobs have in common.

    Args:
        path: The sweep's directory.
        jobs: The overrides of each job.
    """
    return status.title(Sweep(path, (), tuple(reader.labels(jobs)[1])))


def _notes(job: SweepJob, now: float) -> list[str]:
    """The notes about a job that has had a problem or a restart; others fit into one line."""
    return status.notes(job, now) if job.restarts or status.problem_of(job) else []


def _problems(job: SweepJob, now: float) -> list[str]:
    """Only the note about a job's last problem."""
    problem = status.problem_of(job)
    return [problem] if problem else []


def _no_notes(job: SweepJob, now: float) -> list[str]:
    return []


def _totals(jobs: Sequence[SweepJob]) -> list[str]:
    """The restarts of all jobs, and the work lost between the last save and the end of a start."""
    restarted = [job for job in jobs if job.restarts]
    if not restarted:
        return []
    lost = [one for job in restarted for one in attempts.lost(_history(job))]
    found = words.count(sum(job.restarts for job in restarted), "restart")
    steps, seconds = sum(one[1] for one in lost), sum(one[2] for one in lost)
    return [found, f"{words.count(steps, 'step')} repeated ({words.clock(seconds)})"]


def _history(job: SweepJob) -> list[attempts.AttemptRecord]:
    try:
        return job.history()
    except OSError:  # the report names what cannot be read
        return []


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
