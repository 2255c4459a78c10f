"""`forge.Checkpointable` as 2 nodes with 2 tasks each, under submitit's own SlurmExecutor.

As in test_ranked_tasks.py, on a true Slurm. All jobs run at once.
"""

import pytest
import submitit
import submitted_ranks
from cluster import submit, wait_for
from light import POLICY, noted
from submitit.core.utils import FailedJobError

import forge
from forge.jobdir.job_files import STATE, forge_dir, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SIZE = 4
STRIKES = {
    "plain": "",
    "limited": "waits",
    "cancelled": "waits",
    "killed": "SIGKILL",
    "failing": "raises",
    "refused": "kills 0",
    "preempted": "waits",
}
SAVED = {"step_8", "step_9", "step_10"}
"""A signal in step 7 stops all ranks after the same step, which is not always the first."""


class RankedSubmission:
    """One job."""

    def __init__(self, cluster, folder, strike, partition, **requeue):
        self.cluster = cluster
        self.notes = folder
        executor = submitit.SlurmExecutor(folder / "log")
        executor.update_parameters(time=10, nodes=2, ntasks_per_node=2, partition=partition)
        one = forge.Checkpointable(submitted_ranks.train, POLICY | {"requeue": requeue})
        self.job = executor.submit(one, folder, strike)

    def wait(self):
        """Until every rank holds."""
        is_there = lambda: all(self.noted("waits"))  # noqa: E731
        wait_for(is_there, f"waiting ranks of {self.notes}", 300)

    def noted(self, what):
        """By rank."""
        return [noted(self.notes / str(rank), what) for rank in range(SIZE)]

    @property
    def state(self):
        (found,) = self.job.paths.folder.glob(f"{self.job.job_id}_forge_*")
        return read_json(forge_dir(found) / STATE)

    @property
    def shown(self):
        return self.cluster.show(self.job.job_id)


@pytest.fixture(scope="module")
def jobs(cluster, own_environment, tmp_path_factory):
    """All of them at once; the preemption comes last, since it needs both nodes."""
    for name, value in cluster.environment.items():
        own_environment.setenv(name, value)
    folder = tmp_path_factory.mktemp("tasks")
    found = {}
    for name, strike in STRIKES.items():
        partition = "low" if name == "preempted" else "urgent"
        requeue = {"max_failures": 0} if name == "refused" else {}
        found[name] = RankedSubmission(cluster, folder / name, strike, partition, **requeue)
    for name in ("limited", "cancelled", "preempted"):
        found[name].wait()
    cluster.run("scancel", "--signal=USR2", found["limited"].job.job_id)
    cluster.run("scancel", found["cancelled"].job.job_id)
    submit(cluster, folder, "sleep 0.1", "--partition=urgent", "--exclusive", "--nodes=2")
    refused = found["refused"]
    wait_for(lambda: refused.shown["JobState"] == "FAILED", "end of the one whose rank 0 is gone")
    cluster.run("scontrol", "requeue", refused.job.job_id)
    yield found
    cluster.clear()


def test_each_task_is_a_rank_and_returns_its_own(jobs):
    ranks, digests = zip(*jobs["plain"].job.results(), strict=True)
    assert ranks == tuple(range(SIZE))
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("name", "budget", "saved"),
    [
        ("limited", "timeouts", SAVED),
        ("preempted", "preemptions", SAVED),
        ("killed", "failures", {"step_4"}),
    ],
)
def test_it_is_requeued_once_and_ends_with_the_same_bits(jobs, name, budget, saved):
    """Rank 0 decides, on one node, for all of them; a kill repeats what was not saved."""
    one = jobs[name]
    assert one.job.results() == jobs["plain"].job.results()
    assert len({tuple(steps) for steps in one.noted("resumed")}) == 1
    first, second = one.noted("resumed")[0]
    assert first == "None"
    assert second in saved
    assert one.state["state"] == "finished"
    counts = {name: one.state["counts"][name] for name in ("restarts", budget)}
    assert counts == {"restarts": 1, budget: 1}
    assert one.shown["Restarts"] == "1"


def test_a_cancelled_job_is_not_brought_back(jobs):
    """Though its ranks saved; and each of them says so, or submitit would wait for its result."""
    one = jobs["cancelled"]
    for rank in range(SIZE):
        with pytest.raises(FailedJobError, match="it was cancelled"):
            one.job.task(rank).result()
    wait_for(lambda: one.shown["JobState"] == "CANCELLED", "end of the job")
    assert one.shown["Restarts"] == "0"
    assert one.noted("resumed") == [["None"]] * SIZE


def test_what_one_rank_raises_fails_the_job(jobs):
    """It would raise it again."""
    one = jobs["failing"]
    for rank, error in enumerate(("is gone", "ValueError: no such luck", "rank 1", "rank 1")):
        with pytest.raises(FailedJobError, match=error):
            one.job.task(rank).result()
    assert "rank 1 raised an error: see its log" in one.state["because"]
    assert [len(starts) for starts in one.noted("starts")] == [1] * SIZE


def test_where_rank_0_refuses_to_begin_no_other_waits_for_it(jobs):
    """Half an hour, and the nodes with them: the ranks could not meet."""
    one = jobs["refused"]
    for rank in range(SIZE):
        with pytest.raises(FailedJobError, match="max_failures=0"):
            one.job.task(rank).result()
    assert [len(starts) for starts in one.noted("starts")] == [1] * SIZE
    wait_for(lambda: one.shown["JobState"] == "FAILED", "end of the job")
    assert one.shown["Restarts"] == "1"
