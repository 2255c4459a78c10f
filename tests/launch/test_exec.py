"""`forge exec` on one machine: programs that know nothing of forge, under the policy."""

import contextlib
import os
import signal
import sys

import pytest
from commands import COMMANDS, Commands, ends, wait_ready
from harness import until

from forge.errors import ExitCode
from forge.jobdir.job_files import STATE, forge_dir, read_json
from forge.process import processes

QUICK = [name for name in COMMANDS if name != "torchrun"]


@pytest.fixture
def commands(tmp_path):
    with contextlib.closing(Commands(tmp_path / "user's project")) as found:
        yield found


def stop(job, sweep, number=signal.SIGTERM):
    """As a cluster tells a job to leave: in the end it is the supervisor that hears it."""
    wait_ready(job, sweep)
    assert processes.send(job.supervisor, number)


def steps(job):
    return [int(line) for line in (job.directory / "steps.txt").read_text().split()]


@pytest.mark.parametrize("name", QUICK)
def test_a_command_that_is_told_to_leave_runs_again_and_nothing_is_left(name, commands):
    """What saves on a signal exits 0, most of the time, and is not finished by that."""
    sweep = commands.begin(COMMANDS[name], "resilience.shutdown.timeout_s=3")
    job = commands.job(0)
    stop(job, sweep)
    assert sweep.wait() == 0, sweep.output + job.output
    code = {"cd": 0, "pipeline": -15, "wrapper": 0, "deaf": -9, "daemon": 0, "trap": 0}[name]
    assert ends(job) == [f"terminated signalled {code}", "finished finished 0"], job.output
    assert job.state["counts"]["restarts"] == 1
    assert job.marked == []
    if name != "deaf":
        assert steps(job) == list(range(1, 21))  # it came back to where it had saved
