"""`forge rehearse`: does this script end with the same bits when it is stopped and killed?

It runs twice undisturbed, and then as often as wanted hit by a stop and a SIGKILL at steps drawn
from a seed, each time started again by the same command (`rehearsal`, `plan`). What it ends with is
compared with the first run (`comparing`): the newest checkpoint of each `forge.Run`, leaf by leaf,
and all that was logged, step by step. The first run that differs is examined (`hints`).
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from forge.errors import RehearsalFailed
from forge.jobdir import ledger
from forge.rehearse import hints, report
from forge.rehearse.comparing import differing_leaves, differing_values
from forge.rehearse.plan import SIGNALS, STEPS, plan
from forge.rehearse.rehearsal import Rehearsal, Run, Strike
from forge.rehearse.surroundings import Surroundings

_OBJECTS = "live."
"""Where a checkpoint has what was given to `forge.Run`. The rest of it may differ between two
undisturbed runs: by a generator that nobody seeds, and perhaps nobody uses."""
_ATTEMPTS = 3
"""Starts of a disturbed run, each of which may take as long as an undisturbed one."""


@dataclass(kw_only=True)
class Wanted:
    """What a rehearsal is asked for."""

    times: int = 3
    """Disturbed runs."""
    seed: int = 0
    """Of the first of them."""
    signals: Sequence[str] = SIGNALS
    """That are drawn."""
    within_s: float | None = None
    """For all runs; None: no limit."""
    tolerance: float = 0.0
    """By which numbers may differ, relative to the largest of their tensor."""

    steps: int = STEPS
    """To which each loop is shortened; 0: to none."""

    def options(self, seed: int) -> list[str]:
        """Of the command that repeats one disturbed run."""
        names = ",".join(one.removeprefix("SIG") for one in self.signals)
        found = ["--times", "1", "--seed", str(seed)]
        found += ["--signals", names] if list(self.signals) != list(SIGNALS) else []
        found += ["--steps", str(self.steps)] if self.steps != STEPS else []
        return found + (["--tolerance", f"{self.tolerance:g}"] if self.tolerance else [])


class Verdict:
    """One rehearsal, as it comes in."""

    def __init__(self, rehearsal: Rehearsal, wanted: Wanted) -> None:
        self._rehearsal = rehearsal
        self._wanted = wanted
        self._free: set[str] = set()
        """Leaves and logged names that are not compared, since undisturbed runs differ in them."""
        self._began = time.monotonic()
        self._is_examined = False

    def rehearse(self) -> int:
        """0: every run ended as the first; 1: not all did; 2: there is nothing to compare."""
        surroundings = Surroundings(Path.cwd(), self._rehearsal.root)
        say(f"{'run':<14} {'s':>6} {'steps':>6}  {'hit at step → resumed at':<40}")
        try:
            first = self._rehearsal.run("undisturbed 1", [])
            _row(first)
            second = self._rehearsal.run("undisturbed 2", [])
        except RehearsalFailed as error:
            say(f"The undisturbed script {error}")
            has_begun = ledger.read_progress(self._rehearsal.root / "undisturbed_1") is not None
            if has_begun and self._wanted.steps:
                say("Its loops are shortened: --steps 0 rehearses the whole training.")
            return 2
        if not self._agree(first, second):
            return 1
        if not first.num_steps:
            say("Its forge.Run took no step: there is nowhere to hit it.")
            return 2
        disturbed, num_bad = self._disturb(first)
        if 0 < self._wanted.steps <= first.num_steps:
            say(
                f"shortened: loops to {self._wanted.steps} steps, their passes to a third of them;"
                " --steps 0 rehearses the whole training"
            )
        for line in report.lines(first, disturbed, surroundings.written()):
            say(line)
        if num_bad:
            say(f"{num_bad} of {self._num_run} disturbed runs are not identical")
            return 1
        num_hits = sum(len(run.hits) for run in disturbed)
        if not num_hits:
            say("No run was hit: does `resilience.signal.actions` ignore the signals?")
            return 2
        near = f" within {self._wanted.tolerance:g}" if self._wanted.tolerance else ""
        say(f"identical{near}, hit {num_hits} times")
        return 0

    def _agree(self, first: Run, second: Run) -> bool:
        """Whether two undisturbed runs end alike; what else they may differ in is free."""
        tolerance = self._wanted.tolerance
        leaves = [path for path, _ in differing_leaves(first, second, tolerance)]
        places = {*first.states, *second.states}  # one of them alone may have a checkpoint there
        free = {path for path in leaves if path not in places and not path.startswith(_OBJECTS)}
        self._free = free
        if len(free) < len(leaves):
            self._is_same(first, second)
            say(
                "Two undisturbed runs differ, so nothing can be said of resumes. Seed every"
                " generator of random numbers, and choose deterministic kernels where the device"
                " has others; or say with --tolerance by how much numbers may differ."
            )
            return False
        differing = differing_values(first, second, tolerance)
        measured = {name for (_, _, name), _ in differing}
        self._free = free | measured
        _row(second, "identical")
        if measured:
            names = ", ".join(sorted(measured))
            say(f"  not compared, since undisturbed runs differ in them alone: {names}")
        return True

    def _disturb(self, first: Run) -> tuple[list[Run], int]:
        """The disturbed runs that came to an end, and how many did not end as the first."""
        wanted, disturbed, num_bad = self._wanted, [], 0
        self._num_run, needed_s = 0, _ATTEMPTS * first.took_s
        for number in range(wanted.times):
            if number and not self._has_time(needed_s):
                say(f"{number} of {wanted.times} disturbed runs, for the time of --within")
                break
            self._num_run += 1
            name, began = f"disturbed {number + 1}", time.monotonic()
            planned = plan(first.num_boundaries, wanted.seed + number, wanted.signals)
            try:
                run = self._rehearsal.run(name, planned)
                disturbed.append(run)
                is_same = self._is_same(first, run)
                needed_s = time.monotonic() - began
                if not is_same:
                    self._examine(first, run, planned)
            except RehearsalFailed as error:
                say(f"{name:<14} {error}")
                is_same = False
            if not is_same:
                num_bad += 1
                repeated = [*wanted.options(wanted.seed + number), "--", *self._rehearsal.command]
                say(f"  again: forge rehearse {shlex.join(repeated)}")
        return disturbed, num_bad

    def _has_time(self, needed_s: float) -> bool:
        within_s = self._wanted.within_s
        return within_s is None or time.monotonic() - self._began + needed_s <= within_s

    def _examine(self, first: Run, run: Run, planned: list[Strike]) -> None:
        """Say what was probably not saved; of the first run that differs alone."""
        if self._is_examined:
            return
        self._is_examined = True
        if not self._has_time(first.took_s + run.took_s):
            say("  no time of --within is left to find out what was not saved")
            return
        starts = [start for _, _, start in run.resumed_at() if start is not None]
        try:
            found = hints.examine(self._rehearsal, planned, starts, self._free)
        except RehearsalFailed as error:
            found = [f"what was not saved is not known: traced, the script {error}"]
        for line in found:
            say(f"  {line}")

    def _is_same(self, first: Run, run: Run) -> bool:
        """Compare, and print a row, with the first leaf and the first logged value that differ."""
        tolerance, free = self._wanted.tolerance, self._free
        leaves = (one for one in differing_leaves(first, run, tolerance) if one[0] not in free)
        found = [f"leaf {path}: {what}" for path, what in islice(leaves, 1)]
        values = (one for one in differing_values(first, run, tolerance) if one[0][2] not in free)
        for (step, place, name), what in islice(values, 1):
            of_run = f" of {place}" if len(first.states) > 1 else ""
            found.append(f"step {step}: {name}{of_run}: {what}")
        _row(run, "differs" if found else "identical", *found)
        return not found


def _row(run: Run, ended: str = "", *below: str) -> None:
    row = f"{run.name:<14} {run.took_s:6.1f} {run.num_steps:>6}  {run.trace():<40} {ended}"
    say("\n  ".join([row.rstrip(), *below]))


def say(text: str) -> None:
    """Print a line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
