"""A job for which memory runs out, in a memory cgroup that is too small for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plans import planned
from planted_causes import cgroup

from forge.jobdir import job_state
from forge.jobdir.plan import RequeueLimits
from forge.slurm.job_info import JobInfo

LIMIT = 128 * 2**20
EATS = "import os; eaten = [os.urandom(2**20) * 64 for _ in range(100)]"


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/memory").is_dir(),
    reason="only root can make a memory cgroup",
)
def test_a_job_that_is_out_of_memory_twice_in_a_row_ends_and_says_how_much_it_had(tmp_path):
    """It would be as long as ten restarts, each of which ends in the same way on the same node."""
    job = tmp_path / "job"
    (job / ".forge").mkdir(parents=True)
    plan = planned(
        command=[sys.executable, "-c", EATS],
        token=f"out-of-memory-{os.getpid()}",
        time_limit_s=None,
        requeue=RequeueLimits(enabled=True, max_failures=10, max_no_progress=20),
        slurm=None,
    )
    (job / ".forge" / "plan.json").write_text(json.dumps(plan.to_json()))
    with cgroup(LIMIT) as folder:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-m", "forge.job.local", str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 137, done.stdout + done.stderr
    state = job_state.read(job)
    assert (state.state.name, state.reason.name) == ("failed", "out_of_memory")
    assert state.counts.restarts == 1
    assert "the kernel killed 1 process in the task's cgroup, which can use 128.0 MiB" in (
        state.because
    )
    assert state.because.endswith(
        "given up: memory ran out twice in a row, and the next attempt would have no more"
    )


def test_slurm_says_how_much_memory_a_job_had():
    """It is the limit of `--mem`, which a person has to raise."""
    for fields in ("TRES=cpu=1,mem=2000M,node=1", "ReqTRES=cpu=1,mem=1T AllocTRES=cpu=1,mem=2000M"):
        assert JobInfo.parse(f"JobId=7 JobState=OUT_OF_MEMORY {fields}").memory == "2000M"
