"""`forge exec` on a true cluster: Slurm signals every process, and forge nobody a second time."""

import contextlib

import pytest
from cluster import wait_for
from commands import COMMANDS, SlurmCommands, ends, wait_ready

from forge.jobdir.job_files import forge_dir

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

QUICK = [name for name in COMMANDS if name != "torchrun"]


@pytest.fixture(scope="module")
def stopped(cluster, tmp_path_factory):
    """All awkward commands in one sweep, each told to leave once."""
    folder = tmp_path_factory.mktemp("commands") / "project"
    with contextlib.closing(SlurmCommands(cluster, folder)) as found:
        sweep = found.start(
            "--config-name", "conf", f"kind={','.join(QUICK)}", "resilience.shutdown.timeout_s=3"
        )
        sweep.wait_for((forge_dir(found.sweep_dir) / "jobs.jsonl").exists, "jobs")
        for job in found.jobs().values():
            wait_ready(job, sweep)
            job.scancel("--signal=TERM")
        assert sweep.wait() == 0, sweep.output
        yield found.jobs()


@pytest.mark.parametrize("name", QUICK)
def test_a_command_that_slurm_tells_to_leave_runs_again_and_nothing_is_left(name, stopped):
    """Its own processes hear Slurm themselves: what forge passed on would end a save."""
    job = stopped[name]
    code = {"cd": 0, "pipeline": -15, "wrapper": 0, "deaf": -9, "daemon": 0, "trap": 0}[name]
    assert ends(job) == [f"terminated signalled {code}", "finished finished 0"], job.output
    assert job.marked == []
    wait_for(lambda: job.shown["JobState"] == "COMPLETED", "end in Slurm's eyes")
