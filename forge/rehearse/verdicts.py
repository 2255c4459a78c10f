"""`forge rehearse`: does this script end with the same bits when it is stopped and killed?

The script runs twice uninterrupted. Then it runs several times interrupted: a signal that stops it
and a SIGKILL arrive at steps drawn from a seed, and the same command starts it again after each of
them (`rehearsal`, `plan`). The results are compared with those of the first run (`comparing`): the
newest checkpoint of each `forge.Run`, leaf by leaf, all logged values, step by step, and the
numbers that are printed (`printed`). The first run that differs is examined (`hints`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from forge.errors import RehearsalFailed
from forge.rehearse import hints, report
from forge.rehearse.comparing import differing_leaves, differing_values, may_differ
from forge.rehearse.plan import SIGNALS, Strike, plan
from forge.rehearse.printed import Free, differing_prints, numbers_to_compare
from forge.rehearse.rehearsal import Rehearsal, RehearsedRun
from forge.rehearse.terminal import duration, say
from forge.training.loop.trace_recorder import AT_STOPS

IDENTICAL, DIFFERENT, NO_VERDICT = 0, 1, 3
"""Exit codes. No verdict: the script failed by itself, or no run got a signal."""


@dataclass(kw_only=True)
class Wanted:
    """The options of a rehearsal."""

    times: int = 3
    """Number of interrupted runs."""
    seed: int = 0
    """Seed of the first interrupted run; the next one has the next seed."""
    signals: Sequence[str] = SIGNALS
    """Signals to draw from."""
    tolerance: float = 0.0
    """How much numbers can differ, relative to the largest number in their tensor."""

    def options(self, seed: int) -> list[str]:
        """Options of the command that repeats one interrupted run."""
        names = ",".join(one.removeprefix("SIG") for one in self.signals)
        found = ["--times", "1", "--seed", str(seed)]
        found += ["--signals", names] if list(self.signals) != list(SIGNALS) else []
        return found + (["--tolerance", f"{self.tolerance:g}"] if self.tolerance else [])


class RehearsalVerdict:
    """Runs one rehearsal and prints its results as they come in."""

    def __init__(self, rehearsal: Rehearsal, wanted: Wanted) -> None:
        self._rehearsal = rehearsal
        self._wanted = wanted
        self._free: set[str] = set()
        """Leaves and logged names that are not compared, since uninterrupted runs differ, too."""
        self._printed: Free = {}
        self._began = time.monotonic()
        self._is_examined = False

    def rehearse(self) -> int:
        """Run everything; returns `IDENTICAL`, `DIFFERENT` or `NO_VERDICT`."""
        for line in self._title():
            say(line)
        try:
            first = self._rehearsal.run("uninterrupted 1", [])
            _row(first)
            second = self._rehearsal.run("uninterrupted 2", [], AT_STOPS)
        except RehearsalFailed as error:
            say(f"Without any interruption, the script {error}")
            return NO_VERDICT
        if not self._agree(first, second):
            return DIFFERENT
        if not first.num_steps:
            say("Nothing to test: the forge.Run of the script took no step.")
            return NO_VERDICT
        interrupted, num_bad = self._interrupt(first)
        remarks = [] if num_bad else hints.remarks(second.traced, [x.traced for x in interrupted])
        for line in [*remarks, *report.lines(first, interrupted)]:
            say(line)
        return self._conclude(interrupted, num_bad)

    def _title(self) -> Iterator[str]:
        wanted = self._wanted
        runs = "1 run" if wanted.times == 1 else f"{wanted.times} runs"
        yield f"2 uninterrupted runs, then {runs} interrupted by signals and resumed"
        title = "signal at step → resumed at step"
        yield f"{'run':<15} {'seconds':>7} {'steps':>5}  {title:<33}  result"

    def _conclude(self, interrupted: list[RehearsedRun], num_bad: int) -> int:
        took = duration(time.monotonic() - self._began)
        if num_bad:
            times = self._wanted.times
            runs = "run" if times == 1 else "runs"
            say(
                f"DIFFERENT: {num_bad} of {times} interrupted {runs} did not end with the"
                f" same bits ({took})"
            )
            return DIFFERENT
        num_hits = sum(len(run.hits) for run in interrupted)
        if not num_hits:
            say("No run got a signal: does `resilience.signal.actions` ignore the signals?")
            return NO_VERDICT
        tolerance = self._wanted.tolerance
        near = f"within the tolerance {tolerance:g}" if tolerance else "with the same bits"
        runs = "the interrupted run" if len(interrupted) == 1 else "all interrupted runs"
        signals = "1 signal" if num_hits == 1 else f"{num_hits} signals"
        say(f"IDENTICAL: {runs} ended {near} ({signals} sent, {took})")
        return IDENTICAL

    def _agree(self, first: RehearsedRun, second: RehearsedRun) -> bool:
        """Whether two uninterrupted runs have the same bits, in all compared leaves and values."""
        tolerance = self._wanted.tolerance
        leaves = [path for path, _ in differing_leaves(first, second, tolerance)]
        places = {*first.states, *second.states}  # a checkpoint can be missing in one run
        free = {path for path in leaves if path not in places and may_differ(path, first)}
        self._free = free
        if len(free) < len(leaves):
            self._is_same(first, second)
            say(
                "Two uninterrupted runs differ, so that resumed runs cannot be compared. Seed every"
                " random generator and every random split of the data, and choose deterministic"
                " kernels (torch.use_deterministic_algorithms); or allow a difference with"
                " --tolerance."
            )
            return False
        differing = differing_values(first, second, tolerance)
        measured = {name for (_, _, name), _ in differing}
        self._free = free | measured
        self._printed = numbers_to_compare(first, second, tolerance)
        _row(second, "identical")
        if measured:
            names = ", ".join(sorted(measured))
            say(f"  not compared, since they differ even without an interruption: {names}")
        return True

    def _interrupt(self, first: RehearsedRun) -> tuple[list[RehearsedRun], int]:
        """The interrupted runs that finished, and how many runs differ from the first."""
        wanted, interrupted, num_bad = self._wanted, [], 0
        for number in range(wanted.times):
            name = f"interrupted {number + 1}"
            planned = plan(first.num_boundaries, wanted.seed + number, wanted.signals)
            try:
                run = self._rehearsal.run(name, planned, AT_STOPS)
                interrupted.append(run)
                is_same = self._is_same(first, run)
                if not is_same:
                    self._examine(first, run, planned)
            except RehearsalFailed as error:
                say(f"{name:<15} {error}")
                is_same = False
            if not is_same:
                num_bad += 1
                repeated = [*wanted.options(wanted.seed + number), "--", *self._rehearsal.command]
                say(f"  to repeat it: forge rehearse {shlex.join(repeated)}")
        return interrupted, num_bad

    def _examine(self, first: RehearsedRun, run: RehearsedRun, planned: list[Strike]) -> None:
        """Print the state that was probably not saved; only for the first run that differs."""
        if self._is_examined:
            return
        self._is_examined = True
        say("  Finding out what was not saved: the script runs twice more …")
        starts = [start for _, _, start in run.resumed_at() if start is not None]
        try:
            found = hints.examine(self._rehearsal, planned, starts, self._free)
        except RehearsalFailed as error:
            found = [f"That failed: the script {error}"]
        for line in found:
            say(f"  {line}")

    def _is_same(self, first: RehearsedRun, run: RehearsedRun) -> bool:
        """Compare a run with the first; print its row, and the first of each that differ."""
        tolerance, free = self._wanted.tolerance, self._free
        leaves = (one for one in differing_leaves(first, run, tolerance) if one[0] not in free)
        found = [f"leaf {path}: {what}" for path, what in islice(leaves, 1)]
        values = (one for one in differing_values(first, run, tolerance) if one[0][2] not in free)
        for (step, place, name), what in islice(values, 1):
            of_run = f" of {place}" if len(first.states) > 1 else ""
            found.append(f"step {step}: {name}{of_run}: {what}")
        found += islice(differing_prints(first, run, self._printed, tolerance), 1)
        _row(run, "differs" if found else "identical", *found)
        return not found


def _row(run: RehearsedRun, result: str = "", *below: str) -> None:
    row = f"{run.name:<15} {run.took_s:7.1f} {run.num_steps:>5}  {run.trace():<33}  {result}"
    say("\n  ".join([row.rstrip(), *below]))
