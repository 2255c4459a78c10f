"""What the main thread of a Run is doing, section by section, and how long each may take.

    forge.Run is entered    start_up, until the first boundary is left
    a boundary is left      step, until the next one is
    a loop is left          outside: what follows may take as long as it will
    within them             save, evaluation, collective: each ends where it began

Each section is marked in the task's page (`progress.py`) with its limit: `hang.timeout_s`, or a
factor above the slowest of late. What counts is the longest time between two marks of a visit: a
save that writes for an hour makes progress all the time. The first visits of an attempt, and those
in which something is compiled, have `hang.start_s`, and nothing is learned from them.

Below a supervisor alone; else, and with `hang.action=ignore`, nothing is marked or measured.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from forge.config.schema import HangAction, HangConfig
from forge.process import stacks
from forge.process.progress import Marks, Section
from forge.process.time_limit import Recent

NUM_FIRST_STEPS = 3
"""Steps of an attempt that nothing is learned from: kernels are chosen, buckets made anew."""

FACTOR = 5.0
"""How many times slower than the slowest recent visit is no hang yet: the `safety_factor` of
NVIDIA's Resiliency Extension, which learns its timeouts the same way."""

MIN_S = 300.0
"""The least that is learned, in seconds: half of NCCL's timeout for a collective (600 s in torch),
so that stacks are kept before NCCL's watchdog ends the process."""

NUM_LATE = 64
"""Visits of one kind that are of late, at least."""

Listen = Callable[[Callable[..., object], Callable[..., object]], Callable[[], object] | None]


@dataclass(slots=True, eq=False)
class _Visit:
    section: Section
    kind: str
    """Functions of `run.every`, causes of saves: each kind has its own limit."""
    limit_s: float
    is_typical: bool
    """Whether it is learned from."""
    longest_s: float = 0.0
    """Between two marks."""


class Sections:
    """The sections of one Run. Only the thread that makes it enters them.

    Args:
        config: Says how long they may take.
        marks: Where they are marked.
        step: Steps done.
        listen: Lets two functions be called around each compilation, and returns what ends that;
            None where that is not possible yet.
        clock: Seconds, by a clock that nobody sets.
    """

    def __init__(
        self,
        config: HangConfig,
        marks: Marks,
        step: Callable[[], int] = int,
        listen: Listen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._marks = marks
        self._clock = clock
        self._thread = threading.get_ident()
        self._first_s = max(config.start_s, config.timeout_s or MIN_S)
        self._late: dict[tuple[Section, str], Recent] = {}
        """Of each kind that was visited, what its visits have taken."""
        self._num_steps = 0
        self._step = step
        self._last = clock()
        self._visits = [self._visit(Section.start_up, "")]
        """Those that are open; the last one counts."""
        self._listen = listen
        self._stop_listening: Callable[[], object] | None = None
        self._mark()

    def begin_step(self) -> None:
        """A boundary is left."""
        if self._marks.is_open:
            if self._listen is not None and self._stop_listening is None:
                # Torch's compiler may be loaded at any time, and is not loaded for this.
                self._stop_listening = self._listen(
                    self._compilation_begins, self._compilation_ends
                )
            self._num_steps += 1
            self._begin(Section.step)

    def rest(self) -> None:
        """A loop is left: what follows may be anything, and cannot say that it makes progress."""
        if self._marks.is_open:
            self._begin(Section.outside)

    def _begin(self, section: Section) -> None:
        self._close(self._visits[0])
        self._visits = [self._visit(section, "")]
        self._mark()

    def begin_epoch(self) -> None:
        """A step begins a new pass through its data, which may start workers: a kind of its own."""
        if self._is_entered() and self._visits[-1].section is Section.step:
            self._visits[-1] = self._visit(Section.step, "first of an epoch")
            self._mark()

    @contextlib.contextmanager
    def inside(self, section: Section, kind: str = "") -> Iterator[None]:
        """Be in a section; then in the one around it again, whose time begins anew.

        Args:
            section: Which.
            kind: What distinguishes it from visits that take longer or shorter; a wait for other
                ranks is distinguished by the section around it.
        """
        if not self._is_entered():
            yield
            return
        if section is Section.collective:
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

    def advance(self, section: Section) -> None:
        """Something is done in a section: bytes are written, a batch is evaluated. Any thread.

        It is no progress of what the main thread does where that is in another section.
        """
        if self._marks.is_open and self._visits[-1].section is section:
            self._measure()
            self._marks.advance()

    def _compilation_begins(self, *_: object) -> None:
        # From any thread: backward runs in one of torch's.
        if self._marks.is_open:
            visit = self._visits[-1]
            visit.is_typical, visit.limit_s = False, max(visit.limit_s, self._first_s)
            self._marks.enter(Section.compilation, self._step(), visit.limit_s)

    def _compilation_ends(self, *_: object) -> None:
        # What is left of its step is run for the first time, too.
        if self._marks.is_open:
            self._mark()

    def close(self) -> None:
        """Outside of all sections."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        self._marks.close()

    # -- limits --------------------------------------------------------------------------------

    def _visit(self, section: Section, kind: str) -> _Visit:
        if section is Section.outside:
            return _Visit(section, kind, 0.0, is_typical=False)
        late, config = self._late.get((section, kind)), self._config
        is_first = section is Section.step and self._num_steps <= NUM_FIRST_STEPS
        if late is None or is_first:
            return _Visit(section, kind, self._first_s, is_typical=False)
        limit_s = config.timeout_s or max(MIN_S, FACTOR * late.longest)
        return _Visit(section, kind, limit_s, is_typical=True)

    def _close(self, visit: _Visit) -> None:
        """It is over: learn from it."""
        self._measure()
        at_first_s = self._first_s / FACTOR
        late = self._late.setdefault((visit.section, visit.kind), Recent(NUM_LATE, at_first_s))
        if visit.is_typical:
            late.add(visit.longest_s)

    def _measure(self) -> None:
        """The time since the last mark is one of the visit that is open."""
        now, visit = self._clock(), self._visits[-1]
        visit.longest_s = max(visit.longest_s, now - self._last)
        self._last = now

    def _mark(self) -> None:
        visit = self._visits[-1]
        self._marks.enter(visit.section, self._step(), visit.limit_s)

    def _is_entered(self) -> bool:
        return self._marks.is_open and threading.get_ident() == self._thread


_current = Sections(HangConfig(), Marks())


def current() -> Sections:
    """Those of the Run that is open in this process; without one nothing is marked."""
    return _current


@contextlib.contextmanager
def in_section(section: Section, kind: str = "") -> Iterator[None]:
    """Be in a section of the Run that is open; also as a decorator.

    Args:
        section: Which.
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
    """A Run is entered.

    Args:
        config: Its limits.
        environ: Says where its supervisor's page is.
        step: Steps done.
        listen: To compilations; see `Sections`.
    """
    global _current
    marks = Marks() if config.action is HangAction.ignore else Marks.open(environ)
    _current = Sections(config, marks, step, listen)
    stacks.register(environ)  # main may train in a process of its own


def end() -> None:
    """The Run is left."""
    _current.close()
