"""A job of 2 nodes with 2 tasks each on a true Slurm, one rank of which makes no progress."""

import pytest
from hanging_apps import CONF, TRAIN, HangingApp, HangingJob
from harness import assert_same_bits, made_once
from slurm_apps import SlurmApp, SlurmJob

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SIZE = 4
MORE = """
      signal: {warning_s: 30}
      slurm: {partition: low, nodes: 2, tasks_per_node: 2, timeout_min: 10}
"""


class Hanging(SlurmJob, HangingJob):
    """The job."""


@pytest.fixture
def undisturbed(shared_folder):
    """Started here, by the local launcher: the same four ranks."""

    def run(folder):
        HangingApp(folder / "app", SIZE).finish("lr=0.1")

    return HangingJob(made_once(shared_folder / "undisturbed_hangs_4", run) / "app/sweep/0")


def test_a_rank_that_hangs_costs_one_restart_on_the_same_nodes(cluster, tmp_path, undisturbed):
    """Nothing goes back into the queue: the nodes are the job's own, and may be healthy."""
    conf = CONF.replace("    resilience:\n", "    gates: ???\n    resilience:\n", 1)
    app = SlurmApp(cluster, tmp_path / "app", TRAIN, f"{conf.rstrip()}{MORE}")
    try:
        sweep = app.start("hang.where=step", "hang.how=gil", "hang.rank=3")
        assert sweep.wait() == 0, sweep.output
        job = Hanging(cluster, app.jobs_by_place()[0].directory)
    finally:
        app.close()
    for rank in range(SIZE):
        assert_same_bits(job.weights_of(rank), undisturbed.weights_of(rank))
    assert job.metrics == undisturbed.metrics
    (hang,) = job.hangs
    assert (hang["rank"], hang["section"], hang["step"]) == (3, "step", 30)
    found = job.summary()
    assert "in stand_gil" in found["line"]
    assert [found["ranks"][str(rank)]["node"] for rank in range(SIZE)] == ["n1", "n1", "n2", "n2"]
    assert "in stand_gil" in job.stacks(3)
    assert [one["reason"] for one in job.events("end")] == ["hung", "finished"]
    assert (job.counts["hangs"], job.counts["restarts"], job.counts["failures"]) == (1, 1, 0)
    assert job.restarts == 0
    assert job.is_free()
