"""Processes that are forked from one with torch in it: ten times as quick as fresh ones.

For whatever does not depend on how Python begins, or takes its modules apart. They stand in a
session of their own, handlers and all, and there is one at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import Job, assert_same_run, made_once

RUNNER = Path(__file__).with_name("runner.py")


class _Runner:
    """The process that forks, started with the first one."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[str] | None = None
        atexit.register(self._close)

    def run(self, **job: object) -> int:
        if self._popen is None:
            self._popen = subprocess.Popen(
                # Newer Pythons warn of forks beside threads; torch has some that do nothing.
                [sys.executable, "-W", "ignore::DeprecationWarning", str(RUNNER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        pid = None
        try:
            self._popen.stdin.write(json.dumps(job) + "\n")
            self._popen.stdin.flush()
            pid = int(self._popen.stdout.readline())
            return int(self._popen.stdout.readline())
        except BaseException:  # a test's time is up: end its process, and answer nobody late
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            self._close()
            raise

    def _close(self) -> None:
        if self._popen is not None:
            with contextlib.suppress(BrokenPipeError):  # it has died: the next test has another
                self._popen.stdin.close()
            self._popen.wait(60)
            self._popen.stdout.close()
            self._popen = None


_runner = _Runner()


def run(
    command: list[str],
    cwd: Path,
    output: Path,
    errors: Path | None = None,
    kills: dict[str, str] | None = None,
    **env: str,
) -> int:
    """The exit code of `python <command>`, negative for a signal.

    Args:
        command: A script, or `-m` and a module, and arguments.
        output: What is printed is appended here.
        errors: The same of stderr; with stdout by default.
        kills: Step -> signal that the process gets in it.
        env: Added to the environment.
    """
    return _runner.run(
        command=command,
        cwd=str(cwd),
        env={**os.environ, **env},
        stdout=str(output),
        stderr=str(errors or output),
        kills=kills or {},
    )


def completed(
    command: list[str], cwd: Path, *, joins_output: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python <command>`; stdout has what stderr has, too, unless told."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = run(command, cwd, output, output if joins_output else errors, **env)
        texts = [one.read_text(errors="replace") for one in (output, errors) if one.exists()]
    return subprocess.CompletedProcess([sys.executable, *command], code, *texts)


class ForkedJob(Job):
    """A `Job` whose attempts are forked."""

    def run(self, **env: str) -> int:
        spec = dict(self.spec)
        kills = spec.pop("kill_in_attempt", {})
        command = [str(self.script), str(self.directory), json.dumps(spec)]
        return run(command, self.directory, self.directory / "output.txt", kills=kills, **env)


@pytest.fixture(scope="session")
def make_job():
    return ForkedJob


@pytest.fixture(scope="session")
def undisturbed(shared_folder, make_job):
    """The run that nobody interrupted, made once for every spec, for all test processes."""

    def run(**spec):
        spec = {key: value for key, value in spec.items() if key != "kill_at"}
        name = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        folder = made_once(
            shared_folder / f"undisturbed_{name}",
            lambda folder: make_job(folder / "job", **spec).run_to_end(),
        )
        return make_job(folder / "job", **spec)

    return run


@pytest.fixture
def stop_and_compare(tmp_path, make_job, undisturbed):
    """Stop a script's loop at a place, go on, and compare it with the undisturbed run."""

    def check(place, script="loops.py", **spec):
        job = make_job(tmp_path / "job", script=script, kill_at={place: "TERM"}, **spec)
        job.run_to_end(143)
        assert_same_run(job, undisturbed(script=script, **spec))
        return job

    return check
