"""Runs jobs as true processes, signals them at known steps, compares what they leave."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from started import Popen

from forge.jobdir import ledger

JOBS = Path(__file__).parent / "jobs"
FORGE = str(Path(sys.executable).with_name("forge"))
"""The installed script; its arguments begin elsewhere than those of `python -m forge`."""
PATIENCE_S = 120

# Started in the background of a script, or by nohup: what we start would ignore them, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Let the first of several test processes make something in `folder`; the others wait."""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not Path(f"{folder}.made").exists():
            folder.mkdir()
            make(folder)
            Path(f"{folder}.made").touch()
    return folder


def full_pipe() -> tuple[int, int]:
    """(reader, writer) of a pipe that takes no byte more: whoever writes to it blocks."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


def until(condition, what: str) -> None:
    """Poll until it is true; processes that nobody here started give no event to wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S} s"
        select.select([], [], [], 0.01)


def wait_for(condition, process: subprocess.Popen, what: str, timeout_s: float = PATIENCE_S):
    """Poll until `condition()` is true while the process lives; return its value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        if process.poll() is not None:
            value = condition()
            assert value, f"ended with {process.returncode} before {what}"
            return value
        select.select([], [], [], 0.005)
    raise AssertionError(f"no {what} within {timeout_s} s")


def told(path: Path) -> str | None:
    """What another process has said by `write_atomically`, or in one line; nothing so far: None."""
    try:
        return path.read_text() or None
    except FileNotFoundError:
        return None


class Process:
    """A started process in a session of its own; its output goes to a file."""

    def __init__(
        self,
        command: list[str],
        output: Path,
        cwd: Path | None = None,
        popen: Callable[..., subprocess.Popen] = Popen,
        **env: str,
    ):
        self.output_path = output
        with output.open("ab") as file:
            self.popen = popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=os.environ | env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Signal the process alone."""
        self.popen.send_signal(number)

    def signal_session(self, number: int) -> None:
        """Signal every process of the session, as Slurm does with a step."""
        os.killpg(self.pid, number)

    def is_pending(self, number: int) -> bool:
        """Whether a signal was sent that no thread has taken yet."""
        return self._is_in("ShdPnd", number)

    def catches(self, number: int) -> bool:
        """Whether it has a handler for the signal."""
        return self._is_in("SigCgt", number)

    def _is_in(self, mask: str, number: int) -> bool:
        """Whether a set of signals has this one; no set has, once the process is gone."""
        try:
            status = Path("/proc", str(self.pid), "status").read_text()
        except OSError:
            return False
        sets = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(mask)]
        return bool(sum(sets) >> (number - 1) & 1)

    def session_pids(self) -> list[int]:
        """Live processes of the session, found by /proc."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(stat[3]) == self.pid and stat[0] not in "ZX":
                    found.append(int(entry))
        return found

    def is_session_gone(self, timeout_s: float = 60.0) -> bool:
        """Whether no process of the session is left.

        Helpers of the interpreter's own (multiprocessing's resource tracker) end when their pipe
        to the process closes, an instant after it.
        """
        deadline = time.monotonic() + timeout_s
        while self.session_pids() and time.monotonic() < deadline:
            select.select([], [], [], 0.01)
        return self.session_pids() == []

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code; negative for a signal. Kills and fails after `timeout_s`."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGABRT)
            self.popen.wait(60)
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def wait_for(self, condition, what: str, timeout_s: float = PATIENCE_S):
        """Poll until `condition()` is true while the process lives; return its value."""
        try:
            return wait_for(condition, self.popen, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.output}") from None


class Job:
    """`jobs/small.py` (or another script) in a directory, one attempt after the other."""

    def __init__(self, directory: Path, script: str = "small.py", **spec):
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.script = JOBS / script
        self.spec = spec

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(self.script), str(self.directory), json.dumps(self.spec)]

    def start(self, **env: str) -> Process:
        return Process(self.command, self.directory / "output.txt", **env)

    def run(self, **env: str) -> int:
        """One attempt to its end."""
        return self.start(**env).wait()

    def run_to_end(self, *expected: int) -> None:
        """Attempts with the expected exit codes, then one that finishes."""
        for code in (*expected, 0):
            found = self.run()
            assert found == code, f"expected exit code {code}, found {found}:\n{self.output}"

    def wait_for_step(self, process: Process, step: int) -> None:
        """Until the step is under way (or done)."""

        def reached() -> bool:
            progress = ledger.read_progress(self.checkpoints)
            return progress is not None and progress[1] >= step

        process.wait_for(reached, f"step {step}")

    @property
    def output(self) -> str:
        return (self.directory / "output.txt").read_text(errors="replace")

    @property
    def history(self) -> ledger.History:
        return ledger.read(self.checkpoints)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.directory / "weights.pt", weights_only=True)

    @property
    def steps_repeated(self) -> list[int]:
        """For every attempt but the first: completed steps that it did again."""
        starts = [e for a in self.history.attempts for e in a.events if e["kind"] == "start"]
        return [s["previous_step"] - s["step"] for s in starts[1:]]


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_same_run(job: Job, undisturbed: Job) -> None:
    """Same final bits, and the same metrics at every step."""
    assert_same_bits(job.weights, undisturbed.weights)
    assert job.history.metrics == undisturbed.history.metrics
