"""`forge.Checkpointable` under submitit's own SlurmExecutor, on a true Slurm.

All jobs run at once: what takes long is Slurm's pause after a requeue.
"""

import shutil
import subprocess
import sys
from functools import partial

import light
import pytest
import submitit
import submitted
import warm
from cluster import submit as submit_script
from cluster import wait_for
from light import POLICY, noted
from repository import ROOT
from submitit.core.utils import FailedJobError

import forge

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

WEIRD = 'it\'s a "folder" (with spaces)'


class Jobs:
    """The jobs by name, each with a folder in which it notes what it does."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.folder = folder
        waits = partial(forge.Checkpointable, policy=POLICY)
        boundary = waits(partial(submitted.train, how="boundary"), directory=folder / "saves %j")
        two = self._executor(nodelist="n1")
        self.limited, self.cancelled = two.map_array(
            boundary, [folder / "limited", folder / "cancelled"]
        )
        low, zero = (self._executor(nodelist="n2", partition=name) for name in ("low", "zero"))
        self.preempted = low.submit(boundary, folder / "preempted")
        self.brought_back = zero.submit(boundary, folder / "brought back")
        self.failing = self._executor(WEIRD, nodelist="n1").submit(
            waits(light.fail), folder / "failing"
        )

    def _executor(self, name="log", **parameters):
        executor = submitit.SlurmExecutor(self.folder / name)
        executor.update_parameters(time=10, **parameters)
        return executor

    def wait(self, name):
        """Until the job waits in its task."""
        wait_for(lambda: self.noted(name, "waits"), f"waiting job {name}", 120)

    def noted(self, name, what):
        return noted(self.folder / name, what)

    def disturb(self):
        """Signal or preempt each job."""
        for name in ("preempted", "brought back", "limited", "cancelled"):
            self.wait(name)
        submit_script(
            self.cluster,
            self.folder,
            "sleep 0.1",
            "--partition=urgent",
            "--exclusive",
            "--nodelist=n2",
        )
        self.cluster.run("scancel", "--signal=USR2", self.limited.job_id)
        self.cluster.run("scancel", self.cancelled.job_id)


@pytest.fixture(scope="module")
def jobs(cluster, own_environment, tmp_path_factory):
    """Submitted, and all signals sent."""
    for name, value in cluster.environment.items():
        own_environment.setenv(name, value)
    found = Jobs(cluster, tmp_path_factory.mktemp("jobs"))
    found.disturb()
    yield found
    cluster.clear()


def test_slurm_weird_dir(jobs):
    """Quotes and spaces in submitit's folder; and an error is the job's, without a requeue."""
    with pytest.raises(FailedJobError, match="ValueError: no such luck"):
        jobs.failing.result()
    wait_for(lambda: jobs.cluster.show(jobs.failing.job_id)["JobState"] == "FAILED", "end")
    assert len(jobs.noted("failing", "starts")) == 1


def test_a_cancelled_job_is_not_brought_back(jobs):
    """A cancel sends the same signal as a preemption, and the job has saved."""
    with pytest.raises(FailedJobError, match="it was cancelled"):
        jobs.cancelled.result()
    wait_for(lambda: jobs.cluster.show(jobs.cancelled.job_id)["JobState"] == "CANCELLED", "end")
    assert jobs.cluster.show(jobs.cancelled.job_id)["Restarts"] == "0"
    assert jobs.noted("cancelled", "resumed") == ["None"]


def test_the_time_limit_of_one_task_of_an_array(jobs, undisturbed):
    """A requeue that named the array would have brought its cancelled sibling back, too."""
    assert jobs.limited.result() == undisturbed[submitted.train]
    assert jobs.noted("limited", "resumed") == ["None", "step_6"]
    saves = jobs.folder / f"saves {jobs.limited.job_id}"
    assert (saves / "checkpoints" / "step_6" / "manifest.json").exists()
    assert jobs.cluster.show(jobs.limited.job_id)["Restarts"] == "1"


def test_requeuing_checkpointable(jobs, undisturbed):
    """A preemption is announced by SIGTERM, which submitit ignores."""
    assert jobs.preempted.result() == undisturbed[submitted.train]
    assert jobs.noted("preempted", "resumed") == ["None", "step_6"]
    assert jobs.cluster.show(jobs.preempted.job_id)["Restarts"] == "1"


def test_a_preemption_without_grace_time(jobs, undisturbed):
    """Slurm requeues the job itself, so forge must not requeue it again."""
    assert jobs.brought_back.result() == undisturbed[submitted.train]
    assert jobs.noted("brought back", "resumed") == ["None", "step_6"]
    assert jobs.cluster.show(jobs.brought_back.job_id)["Restarts"] == "1"


def test_the_script_of_the_page_runs_as_it_stands(jobs, tmp_path):
    """docs/how-to/submitit.md includes it."""
    assert jobs.cluster
    shutil.copy(ROOT / "examples/gallery/submit.py", tmp_path)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = warm.run([sys.executable, "submit.py"], cwd=tmp_path, text=True, timeout=250, **both)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bias 0.")
