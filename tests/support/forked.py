"""Jobs and commands that are forked, by `warm.py`, and waited for."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from harness import Job, Process, assert_same_run, made_once


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
    with output.open("ab") as printed, (errors or output).open("ab") as failed:
        process = warm.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=failed,
            start_new_session=True,
            kills=kills,
            is_parent="-m" in command[1:],  # a sweep of Hydra's
        )
    with process:
        try:
            return process.wait()
        except BaseException:  # a test's time is up
            process.kill()
            raise


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
    """A `Job` whose attempts are forked: for all but how Python itself begins and ends."""

    def start(self, **env: str) -> Process:
        return Process(self.command, self.directory / "output.txt", popen=warm.Popen, **env)

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
