"""`forge.Checkpointable` under submitit's own SlurmExecutor, on a true Slurm.

All jobs run at once: what takes long is Slurm's pause after a requeue.
"""

from functools import partial

import light
import pytest
import submitit
import submitted
from cluster import submit as submit_script
from cluster import wait_for
from light import POLICY, noted
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
        boundary = waits(partial(submitted.train, how="boundary"))
        two = self._executor(nodelist="n1")
        self.limited, self.cancelled = two.map_array(
            boundary, [folder / "limited", folder / "cancelled"]
        )
        low, zero = (self._executor(nodelist="n2", partition=name) for name in ("low", "zero"))
        self.preempted = low.submit(boundary, folder / "preempted")
        self.brought_back = zero.submit(boundary, folder / "brought back")
        budget = POLICY | {"requeue": {"max_timeouts": 1}}
        late = partial(submitted.train_by_hand, how="late", always=True)
        self.late = self._executor(nodelist="n1").submit(
            forge.Checkpointable(late, budget, folder / "late saves %j"), folder / "late"
        )
        self.failing = self._executor(WEIRD, nodelist="n1").submit(
            waits(light.fail), folder / "failing"
        )

    def _executor(self, name="log", **parameters):
        executor = submitit.SlurmExecutor(self.folder / name)
        executor.update_parameters(time=10, **parameters)
        return executor

    def wait(self, name, count=1):
        """Until the job waits in its task for the `count`th time."""
        wait_for(lambda: len(self.noted(name, "waits")) >= count, f"waiting job {name}", 120)

    def noted(self, name, what):
        return noted(self.folder / name, what)

    def disturb(self):
        """The last signal goes to the one that takes longest to come back."""
        for name in ("late", "preempted", "brought back", "limited", "cancelled"):
            self.wait(name)
        self.cluster.run("scancel", "--signal=USR2", self.late.job_id)
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
    """Submitted, and all but one of the signals sent."""
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
    """Though its signal is that of a preemption, and though it saved."""
    with pytest.raises(FailedJobError, match="it was cancelled"):
        jobs.cancelled.result()
    wait_for(lambda: jobs.cluster.show(jobs.cancelled.job_id)["JobState"] == "CANCELLED", "end")
    assert jobs.cluster.show(jobs.cancelled.job_id)["Restarts"] == "0"
    assert jobs.noted("cancelled", "resumed") == ["None"]


def test_the_time_limit_of_one_task_of_an_array(jobs, undisturbed):
    """A requeue that named the array would have brought its cancelled sibling back, too."""
    assert jobs.limited.result() == undisturbed[submitted.train]
    assert jobs.noted("limited", "resumed") == ["None", "step_6"]
    assert jobs.cluster.show(jobs.limited.job_id)["Restarts"] == "1"


def test_requeuing_checkpointable(jobs, undisturbed):
    """A preemption is told by SIGTERM, which submitit ignores."""
    assert jobs.preempted.result() == undisturbed[submitted.train]
    assert jobs.noted("preempted", "resumed") == ["None", "step_6"]
    assert jobs.cluster.show(jobs.preempted.job_id)["Restarts"] == "1"


def test_a_preemption_without_grace_time(jobs, undisturbed):
    """Slurm has requeued it before it tells: once is enough."""
    assert jobs.brought_back.result() == undisturbed[submitted.train]
    assert jobs.noted("brought back", "resumed") == ["None", "step_6"]
    assert jobs.cluster.show(jobs.brought_back.job_id)["Restarts"] == "1"


def test_training_that_never_polls_and_its_budget(jobs):
    """Saved from outside each time; the second time limit is one too many."""
    jobs.wait("late", 2)
    assert jobs.noted("late", "resumed") == ["None", "step_0"]
    jobs.cluster.run("scancel", "--signal=USR2", jobs.late.job_id)
    with pytest.raises(FailedJobError, match=r"requeue\.max_timeouts=1"):
        jobs.late.result()
    saves = jobs.folder / f"late saves {jobs.late.job_id}"
    assert (saves / "checkpoints" / "step_0" / "manifest.json").exists()
    assert jobs.noted("late", "counts") == ["0", "5"]
