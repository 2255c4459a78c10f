"""Jobs that are forked from one process with torch in it: ten times as quick as fresh ones."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Job, assert_same_run, made_once


class Runner:
    def __init__(self):
        self.start()

    def start(self):
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).parent / "runner.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script, directory, spec):
        job = {"script": script, "directory": str(directory), "spec": spec}
        self.popen.stdin.write(json.dumps(job) + "\n")
        self.popen.stdin.flush()
        pid = int(self.popen.stdout.readline())
        try:
            return int(self.popen.stdout.readline())
        except BaseException:  # a test's time is up: end its job, and answer nobody late
            os.kill(pid, signal.SIGKILL)
            self.close()
            self.start()
            raise

    def close(self):
        self.popen.stdin.close()
        self.popen.wait(60)
        self.popen.stdout.close()


class ForkedJob(Job):
    """A `Job` whose attempts are forked; its processes end as others do, handlers and all."""

    runner: Runner

    def run(self, **env):
        assert not env
        return self.runner.run(self.script.name, self.directory, self.spec)


@pytest.fixture(scope="session")
def runner():
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def make_job(runner):
    def make(directory, **spec):
        job = ForkedJob(directory, **spec)
        job.runner = runner
        return job

    return make


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
