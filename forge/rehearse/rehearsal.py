"""A script, run to its end in a directory of its own: undisturbed, or stopped, killed and resumed.

The directory reaches the script by environment (`job_dir.current`), and so does each strike
(`strikes`); apart from those two variables every start has the same command and environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.checkpoint.format import manifest
from forge.checkpoint.load import inspection
from forge.errors import CheckpointError, ExitCode, RehearsalFailed
from forge.jobdir import ledger
from forge.jobdir.job_files import REHEARSAL
from forge.process import processes
from forge.training.loop import shortened, strikes, traces

_GRACE_S = 5.0
"""In which what a script has started is to end, once that has ended."""
_OFFLINE = {"WANDB_MODE": "offline"}
"""So that loggers take nothing to their servers."""
_SHOWN_LINES = 20
"""Of a script's output, where it fails."""

Logged = tuple[int, str, str]
"""Step, place of the `forge.Run`, name."""


@dataclass(frozen=True)
class Strike:
    """A signal at a boundary, or within the step that follows it."""

    name: str
    count: int
    """Boundaries that the process comes to, this one included."""
    fraction: float
    """Of a step, after that boundary."""

    def ends_with(self, code: int | None) -> bool:
        """Whether that is how a process ends that was hit, in its `forge.Run` or outside it."""
        died = -int(signal.Signals[self.name])
        return code == died or (self.name != "SIGKILL" and code in (ExitCode.REQUEUE, 128 - died))


@dataclass
class Run:
    """The script run to its end, over all attempts, and what that left."""

    name: str
    directory: Path
    hits: list[tuple[str, ledger.Progress]] = field(default_factory=list)
    """Signal, and the step begun last, of each that came."""
    left: list[str] = field(default_factory=list)
    """Commands of processes that were there after the script had ended or was stopped."""
    took_s: float = 0.0
    states: dict[str, Any] = field(default_factory=dict)
    """What the newest checkpoint holds, by its directory in ours."""
    history: ledger.History = field(default_factory=lambda: ledger.History([], {}))

    @property
    def num_steps(self) -> int:
        """Steps of every `forge.Run`; repeated ones count once."""
        return sum(end["step"] for end in _ends(self.history).values() if end)

    @property
    def num_boundaries(self) -> int:
        """Those after the first: one a step, and two more an epoch of `run.epochs`."""
        places = (state.get("epochs") for state in self.states.values())
        return self.num_steps + sum(2 * int(place["epoch"]) for place in places if place)

    def resumed_at(self) -> list[tuple[str, int, int | None]]:
        """Signal, the step begun last, and where the next attempt began, of each hit."""
        attempts = [(one.number, _place(one), one.start_step) for one in self.history.attempts]
        found = []
        for name, at in self.hits:
            place = next((place for number, place, _ in attempts if number == at.attempt), "")
            later = [start for n, other, start in attempts if n > at.attempt and other == place]
            found.append((name, at.step, later[0] if later else None))
        return found

    @property
    def logged(self) -> dict[Logged, float]:
        """Every value that was logged."""
        return {
            (step, place, name): value
            for place, metrics in self.history.runs.items()
            for step, values in metrics.items()
            for name, value in values.items()
        }

    def trace(self) -> str:
        """Where it was hit, and where it resumed."""
        places = {one.number: _place(one) for one in self.history.attempts}
        found = []
        for (name, at), (_, step, start) in zip(self.hits, self.resumed_at(), strict=True):
            of_run = f" of {places.get(at.attempt, '')}" if len(_ends(self.history)) > 1 else ""
            found.append(f"{name} {step}{of_run}" + (f" → {start}" if start is not None else ""))
        return ", ".join(found)


class Rehearsal:
    """Runs of one command, in directories below `root`."""

    def __init__(
        self, command: list[str], root: Path, timeout_s: float | None = None, steps: int = 0
    ) -> None:
        self.command = command
        self.root = root
        self._timeout_s = timeout_s
        self._traced: dict[str, str] = {}
        self._shortened = {shortened.VARIABLE: str(steps)}

    def trace(self, name: str, planned: list[Strike], steps: list[int]) -> Path:
        """Run it as `run` does, noting what it holds at the boundaries of these steps.

        Returns:
            The file that has the notes.
        """
        file = self.root / f"{name.replace(' ', '_')}.jsonl"
        self._traced = {traces.VARIABLE: f"{','.join(map(str, steps))} {file}"}
        try:
            self.run(name, planned)
        finally:
            self._traced = {}
        return file

    def run(self, name: str, planned: list[Strike]) -> Run:
        """Run the script, started again after each strike, until it finishes.

        Raises:
            RehearsalFailed: Where it does not.
        """
        run = Run(name, self.root / name.replace(" ", "_"))
        run.directory.mkdir(parents=True)
        began = time.monotonic()
        for strike in [*planned, None]:
            if self._attempt(run, strike):
                break
        run.took_s = time.monotonic() - began
        if self._timeout_s is None:
            self._timeout_s = 60 + 10 * run.took_s  # a start that takes longer than that hangs
        _collect(run)
        return run

    def _attempt(self, run: Run, strike: Strike | None) -> bool:
        """Start the script once; returns whether it ended by itself."""
        output = run.directory / "output.log"
        own = {REHEARSAL: str(run.directory), **self._shortened}
        env = os.environ | _OFFLINE | self._traced | own
        if strike is not None:
            env[strikes.VARIABLE] = f"{strike.name} {strike.count} {strike.fraction}"
        with output.open("ab") as file:
            offset = file.tell()
            # Raised in a hook of fork, an interrupt would be lost.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                process = subprocess.Popen(
                    self.command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl+C is for us, and we end it
                    preexec_fn=lambda: _begin(mask),
                )
            except OSError as error:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                raise RehearsalFailed(f"cannot be started: {error}") from error
        code: int | None = None
        with process:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = process.wait(self._timeout_s)
                if code >= 0:
                    run.left += _left()
            except subprocess.TimeoutExpired:
                pass
            finally:
                processes.kill_descendants()  # also the workers that a SIGKILL has orphaned
        if strike is not None and strike.ends_with(code):
            progress = ledger.read_progress(run.directory)
            if progress is not None:  # else it was hit by somebody else, before its first step
                run.hits.append((strike.name, progress))
                return False
        if code == 0:
            return True
        ended = f"ended with {code}" if code is not None else f"ran beyond {self._timeout_s:.0f} s"
        hits = f", hit by {run.trace()}" if run.hits else ""
        said = output.read_bytes()[offset:].decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        raise RehearsalFailed("\n  | ".join([f"{ended}{hits}. The end of {output}:", *said]))


def _begin(mask: set[int | signal.Signals]) -> None:
    """In the script's process, before it is one."""
    processes.die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _left() -> list[str]:
    """Commands of what a script has started and left behind."""
    left = processes.wait_gone(processes.descendants(), _GRACE_S)
    return [name for pid in left if (name := processes.command(pid))]


def _place(attempt: ledger.Attempt) -> str:
    """Of which `forge.Run` it is."""
    return next((str(one.get("checkpoints", "")) for one in attempt.events), "")


def _ends(history: ledger.History) -> dict[str, dict[str, Any]]:
    """How the last attempt of each `forge.Run` finished; nothing where it did not."""
    found = {}
    for attempt in history.attempts:
        if attempt.events:  # else it was killed before it could say anything
            ends = (one for one in attempt.events if one["kind"] == "finish")
            found[_place(attempt)] = next(ends, {})
    return found


def _collect(run: Run) -> None:
    run.history = ledger.read(run.directory)
    found = {path.parent.parent for path in run.directory.rglob(manifest.NAME)}
    for path in sorted(found):
        try:
            run.states[str(path.relative_to(run.directory))] = inspection.load(path).state
        except CheckpointError as error:
            raise RehearsalFailed(f"left a checkpoint that cannot be read: {error}") from error
    open_ones = [place for place, end in _ends(run.history).items() if not end]
    if open_ones:
        raise RehearsalFailed(
            f"ended with 0, but its forge.Run did not finish {' '.join(open_ones)}".strip()
        )
    if not run.states:
        raise RehearsalFailed(
            "ended with 0, but no forge.Run finished in it. What forge.Run saves and logs is what"
            " is compared; is `resilience.enabled` false?"
        )
