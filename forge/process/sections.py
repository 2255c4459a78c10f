"""The phases (sections) of a Run's main thread, each with a time limit for hang detection.

    forge.Run is entered    start_up, until the first boundary is left
    a boundary is left      step, until the next boundary is left
    a loop is left          outside: code after a loop has no limit
    within these            save, evaluation, collective; then the outer section continues

Each section is recorded in the heartbeat page (`progress.py`) with its limit: `hang.timeout_s`, or
a multiple of the longest recent gap between two heartbeats in such a section. A save that writes
for an hour sends heartbeats all the time. The first visits of an attempt, and those with a
compilation, have the limit `hang.start_s` and are not used to learn limits.

Without a supervisor, or with `hang.action=ignore`, nothing is recorded or measured.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from forge.config.schema import HangAction, HangConfig
from forge.process.progress import HeartbeatWriter, Phase
from forge.process.time_limit import Recent

NUM_FIRST_STEPS = 3
"""The first steps of an attempt, not used to learn limits: kernels are tuned, buckets rebuilt."""

FACTOR = 5.0
"""The limit as a multiple of the longest recent gap: the `safety_factor` of NVIDIA's Resiliency
Extension, which learns its timeouts in the same way."""

MIN_S = 300.0
"""The smallest learned limit, in seconds: half of NCCL's timeout for a collective (600 s in torch),
so that stacks are written before NCCL's watchdog ends the process."""

NUM_LATE = 64
"""At least so many visits of a kind count as recent."""

Listen = Callable[[Callable[..., object], Callable[..., object]], Callable[[], object] | None]


@dataclass(slots=True, eq=False)
class _Visit:
    section: Phase
    kind: str
    """A function of `run.every`, or the cause of a save: each kind has its own limit."""
    limit_s: float
    is_typical: bool
    """Whether it is used to learn the limit."""
    longest_s: float = 0.0
    """The longest time between two heartbeats."""


class Sections:
    """The sections of one Run. Only the thread that creates it enters them.

    Args:
        config: The time limits.
        marks: Writes the heartbeats.
        step: Returns the number of steps done.
        listen: Registers two functions, called at the begin and end of each compilation; returns a
            function that unregisters them, or None if that is not possible yet.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: HangConfig,
        marks: HeartbeatWriter,
        step: Callable[[], int] = int,
        listen: Listen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._marks = marks
        self._clock = clock
        self._thread = threading.get_ident()
        self._first_s = max(config.start_s, config.timeout_s or MIN_S)
        self._late: dict[tuple[Phase, str], Recent] = {}
        """(section, kind) -> the longest gaps of its recent visits."""
        self._num_steps = 0
        self._step = step
        self._last = clock()
        self._visits = [self._visit(Phase.start_up, "")]
        """The open visits, outermost first; the innermost counts."""
        self._listen = listen
        self._stop_listening: Callable[[], object] | None = None
        self._mark()

    def begin_step(self) -> None:
        """Enter a step, as a boundary is left."""
        if self._marks.is_open:
            if self._listen is not None and self._stop_listening is None:
                # Try at each step: the script can load torch's compiler at any time.
                self._stop_listening = self._listen(
                    self._compilation_begins, self._compilation_ends
                )
            self._num_steps += 1
            self._begin(Phase.step)

    def rest(self) -> None:
        """Leave a loop: the code that follows has no limit, since it sends no heartbeats."""
        if self._marks.is_open:
            self._begin(Phase.outside)

    def _begin(self, section: Phase) -> None:
        self._close(self._visits[0])
        self._visits = [self._visit(section, "")]
        self._mark()

    def begin_epoch(self) -> None:
        """Mark the step as first of an epoch, which can start workers: it has its own limit."""
        if self._is_entered() and self._visits[-1].section is Phase.step:
            self._visits[-1] = self._visit(Phase.step, "first of an epoch")
            self._mark()

    @contextlib.contextmanager
    def inside(self, section: Phase, kind: str = "") -> Iterator[None]:
        """Enter a section for a `with` block; leaving it is a heartbeat of the outer section.

        Args:
            section: The section.
            kind: Distinguishes visits with different durations; for a wait for other ranks, the
                outer section is used.
        """
        if not self._is_entered():
            yield
            return
        if section is Phase.collective:
            around = self._visits[-1]
            kind = f"{around.section.name} {around.kind}"
        self._measure()
        visit = self._visit(section, kind)
        self._visits.append(visit)
        self._mark()
        try:
            yield
        finally:
            if self._marks.is_open and visit in self._visits:
                self._close(visit)
                del self._visits[self._visits.index(visit) :]
                self._mark()

    def advance(self, section: Phase) -> None:
        """Send a heartbeat: bytes were written, a batch was evaluated. From any thread.

        It is ignored if the main thread is in another section.
        """
        if self._marks.is_open and self._visits[-1].section is section:
            self._measure()
            self._marks.advance()

    def _compilation_begins(self, *_: object) -> None:
        # Called from any thread: backward runs in one of torch's threads.
        if self._marks.is_open:
            visit = self._visits[-1]
            visit.is_typical, visit.limit_s = False, max(visit.limit_s, self._first_s)
            self._marks.enter(Phase.compilation, self._step(), visit.limit_s)

    def _compilation_ends(self, *_: object) -> None:
        # Keep the limit of the first visits: the rest of the step also runs for the first time.
        if self._marks.is_open:
            self._mark()

    def close(self) -> None:
        """Leave all sections."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        self._marks.close()

    # -- limits --------------------------------------------------------------------------------

    def _visit(self, section: Phase, kind: str) -> _Visit:
        if section is Phase.outside:
            return _Visit(section, kind, 0.0, is_typical=False)
        late, config = self._late.get((section, kind)), self._config
        is_first = section is Phase.step and self._num_steps <= NUM_FIRST_STEPS
        if late is None or is_first:
            return _Visit(section, kind, self._first_s, is_typical=False)
        limit_s = config.timeout_s or max(MIN_S, FACTOR * late.longest)
        return _Visit(section, kind, limit_s, is_typical=True)

    def _close(self, visit: _Visit) -> None:
        """End a visit and learn from it."""
        self._measure()
        at_first_s = self._first_s / FACTOR
        late = self._late.setdefault((visit.section, visit.kind), Recent(NUM_LATE, at_first_s))
        if visit.is_typical:
            late.add(visit.longest_s)

    def _measure(self) -> None:
        """Add the time since the last heartbeat to the innermost visit."""
        now, visit = self._clock(), self._visits[-1]
        visit.longest_s = max(visit.longest_s, now - self._last)
        self._last = now

    def _mark(self) -> None:
        visit = self._visits[-1]
        self._marks.enter(visit.section, self._step(), visit.limit_s)

    def _is_entered(self) -> bool:
        return self._marks.is_open and threading.get_ident() == self._thread


_current = Sections(HangConfig(), HeartbeatWriter())


def current() -> Sections:
    """The sections of the open Run in this process; without a Run they do nothing."""
    return _current


@contextlib.contextmanager
def in_section(section: Phase, kind: str = "") -> Iterator[None]:
    """Enter a section of the open Run; also works as a decorator.

    Args:
        section: The section.
        kind: See `Sections.inside`.
    """
    with _current.inside(section, kind):
        yield


def begin(
    config: HangConfig,
    environ: Mapping[str, str],
    step: Callable[[], int] = int,
    listen: Listen | None = None,
) -> None:
    """Start the sections of a Run that is being entered.

    Args:
        config: The time limits.
        environ: The environment that names the supervisor's page.
        step: Returns the number of steps done.
        listen: Registers functions for compilations; see `Sections`.
    """
    global _current
    marks = (
        HeartbeatWriter() if config.action is HangAction.ignore else HeartbeatWriter.open(environ)
    )
    _current = Sections(config, marks, step, listen)


def end() -> None:
    """End the sections, as the Run is left."""
    _current.close()
