"""A job of 2 nodes with 2 tasks each, whose nodes die one after the other, on a true Slurm.

    start   runs on            lost                            who notices it
    0       n1 (batch), n2     n2                              Slurm
    1       n1 (batch), n3     n1, and its wrapper; n2 back    Slurm
    2       n2 (batch), n3     n3, which comes back            the ranks and the wrapper

A node that dies takes its slurmd with it, and all that ran there. Slurm notices it by itself after
`SlurmdTimeout` (five minutes); here an administrator is faster, or nobody is.
"""

import pytest
from cluster import Cluster, missing, wait_for
from harness import until
from ranked_apps import assert_same_ranks
from test_ranked_steps import RankedSlurmApp, RankedStep, undisturbed  # noqa: F401 - a fixture

from forge.process import processes
from forge.slurm import client

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SIZE = 4
HOLDS = (15, 25, 35)
"""The step at which each start waits until a node is lost."""


class Losses:
    """The job, and what is done to its nodes."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.app = RankedSlurmApp(cluster, folder / "app")
        self.app.hold(0, *HOLDS)
        self.sweep = self.app.start("kind=plain")
        self.app.wait_for_jobs(self.sweep)
        (self.job,) = (RankedStep(cluster, one.directory) for one in self.app.jobs_by_place())
        self.nodes = []
        """Those of each start."""
        self.seen = []
        """Which nodes are said to be lost after each loss."""

    def lose_one_after_the_other(self):
        self._lose("n2", start=0)
        self._set_down("n2")
        self._lose("n1", start=1)
        self._set_down("n1")
        wait_for(lambda: self.job.shown["JobState"] == "PENDING", "a job without enough nodes")
        self.cluster.bring_back("n2")
        here = self._lose("n3", start=2)
        (self.app.folder / "hold 0").unlink()
        until(lambda: not processes.wait_gone(here, 1), "end of the ranks that live")
        wait_for(lambda: self.job.told[-1]["kind"] == "requeued", "requeue by the wrapper")
        self.seen.append(client.lost_nodes("n[1-3]", 60))
        self.cluster.bring_back("n3")
        wait_for(lambda: self.job.state["state"] == "finished", "end of the job")
        wait_for(lambda: self.job.shown["JobState"] == "COMPLETED", "end of the job for Slurm")
        self.nodes.append(self.job.shown["NodeList"])

    def _lose(self, node, start):
        """Once all ranks hold, and the save before that is committed; the ranks that live."""
        wait_for(lambda: self.job.state.get("counts", {}).get("restarts") == start, "start")
        pids = self.job.held(start, SIZE)
        saved = self.job.directory / f"checkpoints/step_{HOLDS[start] // 10 * 10}/manifest.json"
        until(saved.exists, "a save")
        self.nodes.append(self.job.shown["NodeList"])
        lost = [pid for pid in pids if processes.variable(pid, "SLURMD_NODENAME") == node]
        assert len(lost) == 2
        self.cluster.lose(node)
        return [pid for pid in pids if pid not in lost]

    def _set_down(self, node):
        self.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        self.seen.append(client.lost_nodes("n[1-3]", 60))


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    if missing():
        pytest.skip(missing())
    folder = tmp_path_factory.mktemp("losses")
    cluster = Cluster(folder / "slurm", nodes=3)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        found = Losses(cluster, folder)
        try:
            found.lose_one_after_the_other()
            yield found
        finally:
            found.app.close()
            cluster.stop()


def test_it_ends_with_the_bits_of_an_undisturbed_job(losses, undisturbed):  # noqa: F811
    """Three nodes were lost under it, and nothing of that is in its weights."""
    assert_same_ranks(losses.job, undisturbed, SIZE)
    assert losses.sweep.wait() == 0, losses.sweep.output


def test_it_runs_on_what_is_left_and_else_when_a_node_is_back(losses):
    """Two nodes of three are enough; of one it waits for a second."""
    assert losses.nodes == ["n[1-2]", "n[1,3]", "n[2-3]", "n[2-3]"]
    assert losses.seen == [["n2"], ["n1", "n2"], ["n1", "n3"]]


def test_each_lost_node_costs_one_restart_and_no_failure(losses):
    """Whether Slurm requeues it, the next start notices it, or the wrapper does before Slurm."""
    job = losses.job
    assert job.restarts == 3
    assert [one["because"] for one in job.told if one["kind"] == "requeue"] == ["node failed"] * 3
    assert [one["kind"] for one in job.told].count("requeued") == 1
    names = ("restarts", "preemptions", "failures", "early_evictions")
    assert [job.counts[name] for name in names] == [3, 3, 0, 0]


def test_each_start_resumes_from_the_last_save(losses):
    """The ranks that live save nothing for those that died."""
    assert losses.job.starts == [0, *(step // 10 * 10 for step in HOLDS)]


def test_nothing_of_any_start_is_left(losses):
    """The tasks that outlived their node's peers have left by themselves."""
    assert losses.job.is_free()
