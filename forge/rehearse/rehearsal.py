"""Runs a script to its end in its own directory: uninterrupted, or interrupted and resumed.

Two environment variables pass the directory (`job_dir.current`) and the next signal
(`fault_injection`) to the script; apart from these every start has the same command and
environment.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.checkpoint import inspection
from forge.checkpoint.format import manifest
from forge.errors import CheckpointError, RehearsalFailed
from forge.jobdir import ledger
from forge.jobdir.job_files import REHEARSAL
from forge.process import processes
from forge.rehearse.plan import Strike
from forge.training.loop import fault_injection, trace_recorder

_GRACE_S = 5.0
"""Seconds that processes started by a script have to end, once the script has ended."""
_OFFLINE = {"WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}
"""Variables that keep loggers from uploading data, and a kill from losing what was printed."""
_MOST_PRINTED = 1 << 26
"""Bytes of a run's output beyond which it is not compared."""
_SHOWN_LINES = 20
"""Last lines of a script's output that are shown if it fails."""
_LOOK_S = 1.0
"""Seconds between two checks of the script's progress."""

Logged = tuple[int, str, str]
"""Step, place of the `forge.Run`, name."""


@dataclass
class RehearsedRun:
    """One run of the script to its end, over all attempts, and its results."""

    name: str
    directory: Path
    hits: list[tuple[str, ledger.Progress]] = field(default_factory=list)
    """Each signal that arrived, and the last step that had begun."""
    left: list[str] = field(default_factory=list)
    """Commands of processes that outlived the script."""
    begins: list[int] = field(default_factory=list)
    """The place in the output at which each attempt begins."""
    began: float = 0.0
    """Monotonic time of the first start."""
    took_s: float = 0.0
    states: dict[str, Any] = field(default_factory=dict)
    """State of the newest checkpoint, by its directory relative to `directory`."""
    history: ledger.History = field(default_factory=lambda: ledger.History([], {}))

    @property
    def traced(self) -> Path:
        """The record of the script's variables, if they were recorded."""
        return self.directory / "traced.jsonl"

    @property
    def num_steps(self) -> int:
        """Steps of all `forge.Run` together; a repeated step counts once."""
        return sum(end["step"] for end in _ends(self.history).values() if end)

    @property
    def num_boundaries(self) -> int:
        """Step boundaries after the first: one a step, and two more an epoch of `run.epochs`."""
        places = (state.get("epochs") for state in self.states.values())
        return self.num_steps + sum(2 * int(place["epoch"]) for place in places if place)

    @property
    def is_pushed(self) -> bool:
        """Whether all loops belong to a trainer, which calls `run.boundary`."""
        places = [one for state in self.states.values() for one in state.get("positions", [])]
        return bool(places) and all(one and one.get("is_pushed") for one in places)

    def resumed_at(self) -> list[tuple[str, int, int | None]]:
        """For each signal: its name, the last step begun, the step at which the job resumed."""
        attempts = [(one.number, _place(one), one.start_step) for one in self.history.attempts]
        found = []
        for name, at in self.hits:
            place = next((place for number, place, _ in attempts if number == at.attempt), "")
            later = [start for n, other, start in attempts if n > at.attempt and other == place]
            found.append((name, at.step, later[0] if later else None))
        return found

    @property
    def logged(self) -> dict[Logged, float]:
        """All logged values."""
        return {
            (step, place, name): value
            for place, metrics in self.history.runs.items()
            for step, values in metrics.items()
            for name, value in values.items()
        }

    def printed(self) -> list[str]:
        """The output of each attempt, without the path of the run's own directory."""
        path = self.directory / "output.log"
        if not path.exists() or path.stat().st_size > _MOST_PRINTED:
            return []
        output, ends = path.read_bytes(), [*self.begins[1:], None]
        texts = [output[begin:end] for begin, end in zip(self.begins, ends, strict=True)]
        own = str(self.directory)
        return [text.decode(errors="replace").replace(own, "") for text in texts]

    def trace(self) -> str:
        """The steps at which the run got signals and at which it resumed."""
        places = {one.number: _place(one) for one in self.history.attempts}
        found = []
        for (name, at), (_, step, start) in zip(self.hits, self.resumed_at(), strict=True):
            of_run = f" of {places.get(at.attempt, '')}" if len(_ends(self.history)) > 1 else ""
            found.append(f"{name} {step}{of_run}" + (f" → {start}" if start is not None else ""))
        return ", ".join(found)


class Rehearsal:
    """Runs of one command, in directories below `root`."""

    def __init__(
        self,
        command: list[str],
        root: Path,
        timeout_s: float | None = None,
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Prepare runs; nothing is started yet.

        Args:
            command: Starts the script.
            root: Directory for the directories of all runs.
            timeout_s: Limit of each start of the script; None: derived from the first run's time.
            show: Called about once a second with a description of the present run.
        """
        self.command = command
        self.root = root
        self._show = show
        self._timeout_s = timeout_s
        self._traced: dict[str, str] = {}

    def trace(self, name: str, planned: list[Strike], steps: list[int]) -> Path:
        """Run the script as `run` does, and record its variables at the boundaries of these steps.

        Returns:
            The file with the record.
        """
        return self.run(name, planned, ",".join(map(str, steps))).traced

    def run(self, name: str, planned: list[Strike], trace: str | None = None) -> RehearsedRun:
        """Run the script until it finishes, and start it again after each signal.

        Args:
            name: Of the run, and of its directory.
            planned: The signals.
            trace: Boundaries at which its variables are recorded; see `trace_recorder`.
        Raises:
            RehearsalFailed: If it fails, or does not finish.
        """
        run = RehearsedRun(name, self.root / name.replace(" ", "_"))
        run.directory.mkdir(parents=True)
        self._traced = {} if trace is None else {trace_recorder.VARIABLE: f"{trace} {run.traced}"}
        run.began = began = time.monotonic()
        for strike in [*planned, None]:
            if self._attempt(run, strike):
                break
        run.took_s = time.monotonic() - began
        if self._timeout_s is None:
            self._timeout_s = 60 + 10 * run.took_s  # a start that takes longer than that hangs
        _collect(run)
        return run

    def _attempt(self, run: RehearsedRun, strike: Strike | None) -> bool:
        """Start the script once; returns whether it ended by itself."""
        output = run.directory / "output.log"
        env = os.environ | _OFFLINE | self._traced | {REHEARSAL: str(run.directory)}
        if strike is not None:
            env[fault_injection.VARIABLE] = f"{strike.name} {strike.count} {strike.fraction}"
        with output.open("ab") as file:
            offset = file.tell()
            run.begins.append(offset)
            try:
                process = subprocess.Popen(
                    self.command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl+C ends only this process
                )
            except OSError as error:
                raise RehearsalFailed(f"could not be started: {error}") from error
        code: int | None = None
        with process:
            try:
                code = self._wait(process, run)
                if code is not None and code >= 0:
                    run.left += _left()
            finally:
                processes.kill_descendants()  # also the workers that a SIGKILL has orphaned
        if strike is not None and strike.ends_with(code):
            progress = ledger.read_progress(run.directory)
            if progress is not None:  # else another process has signalled it, before its first step
                run.hits.append((strike.name, progress))
                return False
        if code == 0:
            return True
        ended = f"exited with code {code}"
        if code is None:
            ended = f"did not end within {self._timeout_s:.0f} s (--timeout-s)"
        hits = f", after {run.trace()}" if run.hits else ""
        lines = output.read_bytes()[offset:].decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        raise RehearsalFailed("\n  | ".join([f"{ended}{hits}. Last lines of {output}:", *lines]))

    def _wait(self, process: subprocess.Popen[bytes], run: RehearsedRun) -> int | None:
        """The exit code of the process; None if it takes longer than the limit."""
        limit_s = self._timeout_s if self._timeout_s is not None else math.inf
        deadline = time.monotonic() + limit_s
        while True:
            progress = ledger.read_progress(run.directory)
            step = f"step {progress.step}" if progress else "starting"
            sent = f", signals sent: {len(run.hits)}" if run.hits else ""
            self._show(f"{run.name}: {step}, {time.monotonic() - run.began:.0f} s{sent} …")
            try:
                return process.wait(min(_LOOK_S, max(deadline - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    return None


def _left() -> list[str]:
    """Commands of processes that a script has started and left behind."""
    left = processes.wait_gone(processes.descendants(), _GRACE_S)
    return [name for pid in left if (name := processes.command(pid))]


def _place(attempt: ledger.AttemptLog) -> str:
    """The checkpoint directory of the `forge.Run` that this attempt belongs to."""
    return next((str(one.get("checkpoints", "")) for one in attempt.events), "")


def _ends(history: ledger.History) -> dict[str, dict[str, Any]]:
    """The `finish` event of the last attempt of each `forge.Run`; empty if it did not finish."""
    found = {}
    for attempt in history.attempts:
        if attempt.events:  # else it was killed before its first event
            ends = (one for one in attempt.events if one["kind"] == "finish")
            found[_place(attempt)] = next(ends, {})
    return found


def _collect(run: RehearsedRun) -> None:
    with contextlib.suppress(FileNotFoundError):  # no forge.Run was entered
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
            f"exited with code 0, but its forge.Run did not finish {' '.join(open_ones)}".strip()
        )
    if not run.states:
        raise RehearsalFailed(
            "exited with code 0, but no forge.Run in it finished, so there are no checkpoints"
            " and logged values to compare. Is `resilience.enabled` false?"
        )
