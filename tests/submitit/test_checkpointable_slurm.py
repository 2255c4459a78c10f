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
from cluster import wait_for
from light import POLICY, noted
from repository import ROOT
from slurm_apps import urgent
from submitit.core.utils import FailedJobError

import forge
from forge.jobdir.job_files import STATE, forge_dir, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

WEIRD = 'it\'s a "folder" (with spaces)'


class Jobs:
    """The jobs by name, each with a folder in which it notes what it does."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.folder = folder
        trains = partial(submitted.train, how="boundary", num_waiting=2)
        low, zero = (self._executor(partition=name) for name in ("low", "zero"))
        with low.batch():  # an array
            self.disturbed = self._submit(low, trains, "disturbed", folder / "saves %j")
            self.cancelled = self._submit(low, light.wait_without_a_run, "cancelled")
        self.brought_back = self._submit(zero, light.wait_once, "brought back")
        self.failing = self._submit(self._executor(WEIRD), light.fail, "failing")

    def _submit(self, executor, task, name, directory=None):
        return executor.submit(forge.Checkpointable(task, POLICY, directory), self.folder / name)

    def _executor(self, name="log", **parameters):
        executor = submitit.SlurmExecutor(self.folder / name)
        executor.update_parameters(time=10, nodelist="n1", **parameters)
        return executor

    def wait(self, name, num_starts=1):
        """Until the job waits in its task."""
        wait_for(lambda: len(self.noted(name, "waits")) == num_starts, f"waiting job {name}", 120)

    def noted(self, name, what):
        return noted(self.folder / name, what)

    def wait_for_state(self, job, state):
        """Until Slurm's controller says so."""
        wait_for(lambda: self.cluster.show(job.job_id)["JobState"] == state, state)

    def disturb(self):
        """Cancel one, preempt the others, and announce the time limit to one of those."""
        for name in ("disturbed", "cancelled", "brought back"):
            self.wait(name)
        self.cluster.run("scancel", self.cancelled.job_id)
        self.wait_for_state(self.cancelled, "CANCELLED")
        self.wait_for_state(self.failing, "FAILED")
        urgent(self.cluster, self.folder, "--nodelist=n1")
        self.wait("disturbed", 2)
        self.cluster.run("scancel", "--signal=USR2", self.disturbed.job_id)


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
    assert len(jobs.noted("failing", "starts")) == 1


def test_a_cancelled_job_is_not_brought_back(jobs):
    """A cancel sends the same signal as a preemption."""
    with pytest.raises(FailedJobError, match="it was cancelled"):
        jobs.cancelled.result()
    assert jobs.cluster.show(jobs.cancelled.job_id)["Restarts"] == "0"
    assert len(jobs.noted("cancelled", "starts")) == 1


def test_requeuing_checkpointable(jobs, undisturbed):
    """A preemption is announced by SIGTERM, which submitit ignores; then comes the time limit.

    A requeue that named the array would have brought its cancelled sibling back, too.
    """
    assert jobs.disturbed.result() == undisturbed[submitted.train]
    assert jobs.noted("disturbed", "resumed") == ["None", "step_6", "step_7"]
    saves = jobs.folder / f"saves {jobs.disturbed.job_id}"
    assert (saves / "checkpoints" / "step_6" / "manifest.json").exists()
    counts = read_json(forge_dir(saves) / STATE)["counts"]
    assert (counts["preemptions"], counts["timeouts"], counts["failures"]) == (1, 1, 0)
    assert jobs.cluster.show(jobs.disturbed.job_id)["Restarts"] == "2"


def test_a_preemption_without_grace_time(jobs):
    """Slurm requeues the job itself, so forge must not requeue it again."""
    assert jobs.brought_back.result() == "waited"
    assert jobs.cluster.show(jobs.brought_back.job_id)["Restarts"] == "1"


def test_the_script_of_the_page_runs_as_it_stands(jobs, tmp_path):
    """docs/how-to/submitit.md includes it."""
    assert jobs.cluster
    shutil.copy(ROOT / "examples/gallery/submit.py", tmp_path)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = warm.run([sys.executable, "submit.py"], cwd=tmp_path, text=True, timeout=250, **both)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bias 0.")
