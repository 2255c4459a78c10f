"""A run of the demo: the processes that carry it, and what its ledger tells meanwhile."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge import ledger

HELD_OUT = re.compile(r"held-out loss ([\d.]+)")


@dataclass
class Blow:
    """One thing done to a run, in the first step at or after `step`."""

    name: str
    signal: int
    code: int
    """What the process has to end with, in `subprocess`'s notation."""
    story: str
    damages: bool = False
    step: int = 0


@dataclass
class Attempt:
    """One process of a run; times in unix seconds, 0 for what has not happened."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    began: float = 0.0
    """When training began, at `first_step`."""
    first_step: int = 0
    previous_step: int = 0
    """Where the attempt before it ended."""
    passed_over: list[str] = field(default_factory=list)
    regained: float = 0.0
    """When it was again where the attempt before it ended."""
    blow: Blow | None = None
    struck: float = 0.0
    damaged: str | None = None
    """The checkpoint that was damaged after it ended."""
    last_step: int = 0
    ended: float = 0.0

    @property
    def repeated(self) -> int:
        """Steps that the attempt before it had done already."""
        return max(0, self.previous_step - self.first_step)

    @property
    def code(self) -> int | None:
        """How the process ended: its exit code, or minus the signal that killed it."""
        return self.process.returncode


@dataclass
class Job:
    """A run in its directory, through all its attempts."""

    name: str
    directory: Path
    steps: int
    attempts: list[Attempt] = field(default_factory=list)
    is_finished: bool = False

    @property
    def attempt(self) -> Attempt:
        """The newest one."""
        return self.attempts[-1]

    @property
    def last_step(self) -> int:
        """Steps done, as far as anybody knows."""
        return self.attempt.last_step

    def start(self, command: str) -> None:
        """Begin the next attempt with a shell command; its output goes into a file."""
        number = len(self.attempts) + 1
        log = self.directory.with_name(f"{self.name}_attempt_{number}.txt")
        # With `exec` the shell becomes the training: its pid and exit code are ours to see.
        where, joint, program = command.rpartition(" && ")
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", f"{where}{joint}exec {program}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl+C that is meant for the demo stays there
            )
        previous = self.attempts[-1].last_step if self.attempts else 0
        self.attempts.append(Attempt(number, process, log, time.time(), last_step=previous))

    def step(self) -> int | None:
        """Steps that the newest attempt stands at; None while it is starting."""
        progress = ledger.read_progress(self.directory)
        if progress is None or progress[0] != self.attempt.number:
            return None
        self.attempt.last_step = progress[1]
        return progress[1]

    def note_progress(self) -> None:
        """Note the moments at which the newest attempt began, caught up, and ended."""
        attempt, step = self.attempt, self.step()
        if step is not None and not attempt.began and (start := self.event("start")):
            attempt.began, attempt.first_step = start["t"], start["step"]
            attempt.previous_step = start["previous_step"] or 0
            attempt.passed_over = start["passed_over"]
        if step is not None and not attempt.regained and step >= attempt.previous_step:
            attempt.regained = time.time()
        self.has_ended()

    def has_ended(self) -> bool:
        """Whether the newest attempt's process is gone."""
        if self.attempt.process.poll() is None:
            return False
        self.step()
        self.attempt.ended = self.attempt.ended or time.time()
        return True

    def event(self, kind: str) -> dict[str, Any] | None:
        """The newest attempt's entry of this kind in the ledger."""
        for attempt in ledger.read(self.directory).attempts:
            if attempt.number == self.attempt.number:
                return next((event for event in attempt.events if event["kind"] == kind), None)
        return None

    def resume_command(self) -> str:
        """As forge left it on disk."""
        return (self.directory / ".forge" / "resume.sh").read_text().splitlines()[-1]

    def remark(self) -> str:
        """The held-out loss last reported, and which attempt this is."""
        logs = (attempt.log.read_text(errors="replace") for attempt in reversed(self.attempts))
        found = next((losses[-1] for losses in map(HELD_OUT.findall, logs) if losses), None)
        remarks = [f"held-out loss {found}" if found else ""]
        if self.step() is None:
            remarks.append("starting")
        elif self.attempt.number > 1:
            remarks.append(f"attempt {self.attempt.number}")
        return ", ".join(filter(None, remarks))


def damage_newest(checkpoints: Path) -> str:
    """Flip one bit in the middle of the biggest file of the newest checkpoint; its name."""
    newest = (checkpoints / "latest").resolve()
    biggest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    with biggest.open("r+b") as file:
        file.seek(biggest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return newest.name
