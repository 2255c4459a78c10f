"""A sweep of the demo: its launchers and jobs, the processes to kill, and its attempts."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_screen import Screen

from forge.jobdir import ledger
from forge.jobdir.job_files import OUTPUT, STATE, forge_dir, read_json
from forge.process import processes


@dataclass
class Fault:
    """A fault, injected once every job that it hits has reached `step`."""

    name: str
    target: str
    """The process that gets the signal: the task or the supervisor of a job, or the launcher."""
    hits: Sequence[int]
    """Numbers of the jobs that it ends."""
    code: int
    """The expected end of their tasks: an exit code, or minus the number of the fatal signal."""
    story: str
    damages: bool = False
    step: int = 0
    injected: float = 0.0
    """Unix time."""
    damaged: str = ""
    """The checkpoint that was damaged."""


@dataclass
class Attempt:
    """One task of a job; times in unix seconds, 0 if the event has not happened."""

    number: int
    started: float
    ended: float = 0.0
    code: int | None = None
    text: str = ""
    """How the task ended, in the words of the job's wrapper."""
    began: float = 0.0
    """When training began, at `first_step`."""
    first_step: int = 0
    last_step: int = 0
    repeated: int = 0
    """Steps that the previous attempt had already done."""
    regained: float = 0.0
    """When the attempt reached the step at which the previous one ended."""
    passed_over: list[str] = field(default_factory=list)
    fault: Fault | None = None

    @property
    def ended_by(self) -> str:
        """The fault that ended the attempt, or how it ended by itself."""
        return self.fault.name if self.fault else self.text


@dataclass
class Job:
    """A job of a sweep, through all its attempts."""

    number: int
    label: str
    directory: Path
    steps: int
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(unix time, attempt, steps done), recorded at each change."""

    def sample(self) -> None:
        """Record the progress, if it changed."""
        progress = ledger.read_progress(self.directory)
        if progress is not None and (progress.attempt, progress.step) != self.stand():
            self.samples.append((time.time(), progress.attempt, progress.step))

    def stand(self) -> tuple[int, int]:
        """(attempt that trained last, steps done)."""
        return self.samples[-1][1:] if self.samples else (0, 0)

    def trains_after(self, attempt: int) -> bool:
        """Whether a later attempt than this one has begun to train."""
        return self.stand()[0] > attempt

    def state(self) -> dict[str, Any]:
        """The state that the job's wrapper wrote."""
        return read_json(forge_dir(self.directory) / STATE) or {"state": "", "pid": 0}

    def metrics(self) -> dict[int, dict[str, float]]:
        """The values logged in each step."""
        return ledger.read(self.directory).metrics

    def output(self) -> str:
        """The output of its tasks."""
        return (self.directory / OUTPUT).read_text(errors="replace")

    def attempts(self, faults: Sequence[Fault] = ()) -> list[Attempt]:
        """The attempts, put together from the job's ledgers."""
        found: list[Attempt] = []
        path = forge_dir(self.directory) / "ledger" / "job.jsonl"
        for event in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            if event["kind"] == "attempt":
                found.append(Attempt(len(found) + 1, event["t"]))
            elif event["kind"] == "end":
                last = found[-1]
                last.ended, last.code, last.text = event["t"], event["code"], event["text"]
        for trained in ledger.read(self.directory).attempts:
            start = next((event for event in trained.events if event["kind"] == "start"), None)
            if start is not None:
                own = [attempt for attempt in found if attempt.started <= start["t"]][-1]
                self._drain_signals(own, trained.number, start)
                if own.number > 1:
                    found[own.number - 2].last_step = start["previous_step"]
        if found:
            found[-1].last_step = self.stand()[1]
        for attempt in found:
            for fault in faults:
                is_its = attempt.started <= fault.injected <= (attempt.ended or fault.injected)
                if self.number in fault.hits and is_its:
                    attempt.fault = fault
        return found

    def _drain_signals(self, attempt: Attempt, number: int, start: dict[str, Any]) -> None:
        attempt.began, attempt.first_step = start["t"], start["step"]
        attempt.passed_over = start["passed_over"]
        before = start["previous_step"] or 0
        attempt.repeated = max(0, before - start["step"])
        attempt.regained = next(
            (t for t, n, step in self.samples if n == number and step >= before), 0.0
        )

    def damage_newest(self) -> str:
        """Flip one bit in the middle of the biggest file of the newest checkpoint; its name."""
        newest = (self.directory / "checkpoints" / "latest").resolve()
        biggest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
        with biggest.open("r+b") as file:
            file.seek(biggest.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        return newest.name


@dataclass
class Sweep:
    """A sweep in its directory, through all its launchers."""

    name: str
    directory: Path
    jobs: list[Job]
    launcher: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    ended: float = 0.0

    def start(self, command: Sequence[str | Path], screen: Screen) -> None:
        """Start the sweep, or resume it."""
        self.started = self.started or time.time()
        self.launcher = screen.start(command)

    def resume(self, screen: Screen) -> None:
        """Resume the sweep by its resume.sh, which has the command that the launcher printed."""
        self.start(["sh", forge_dir(self.directory) / "resume.sh"], screen)

    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        if self.launcher is None or self.launcher.poll() is None:
            return False
        self.ended = time.time()
        return True

    def processes_of(self, job: Job) -> dict[str, int]:
        """The pids of a job's supervisor and task; empty while this sweep has not started them."""
        wrapper = job.state()["pid"]
        if self.launcher is None or wrapper not in processes.descendants(self.launcher.pid):
            return {}
        return dict(zip(("supervisor", "task"), processes.descendants(wrapper), strict=False))
