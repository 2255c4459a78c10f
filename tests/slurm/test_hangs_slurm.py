"""A job of two nodes on a true Slurm, one rank of which makes no progress."""

import pytest
from hanging_apps import CONF, TRAIN, HangingApp, HangingJob
from harness import assert_same_bits, made_once
from slurm_apps import SlurmApp, SlurmJob

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

MORE = """
      signal: {warning_s: 30}
      slurm: {partition: low, nodes: 2, tasks_per_node: %d, timeout_min: 10}
"""


class Hanging(SlurmJob, HangingJob):
    """The job."""


@pytest.fixture
def undisturbed(shared_folder):
    """Started here, by the local launcher: as many ranks."""

    def run(size):
        make = lambda folder: HangingApp(folder / "app", size).finish("lr=0.1")  # noqa: E731
        made = made_once(shared_folder / f"undisturbed_hangs_{size}", make)
        return HangingJob(made / "app/sweep/0")

    return run


@pytest.mark.parametrize("tasks", [1, pytest.param(2, marks=pytest.mark.proofs)])
def test_a_rank_that_hangs_costs_one_restart_on_the_same_nodes(
    cluster, tmp_path, undisturbed, tasks
):
    """Nothing goes back into the queue: the nodes are the job's own, and may be healthy."""
    conf = CONF.replace("    resilience:\n", "    gates: ???\n    resilience:\n", 1)
    app = SlurmApp(cluster, tmp_path / "app", TRAIN, f"{conf.rstrip()}{MORE % tasks}")
    size = 2 * tasks
    last = size - 1
    try:
        sweep = app.start("hang.where=step", "hang.how=gil", f"hang.rank={last}")
        assert sweep.wait() == 0, sweep.output
        job = Hanging(cluster, app.jobs_by_place()[0].directory)
    finally:
        app.close()
    expected = undisturbed(size)
    for rank in range(size):
        assert_same_bits(job.weights_of(rank), expected.weights_of(rank))
    assert job.metrics == expected.metrics
    reasons = [one["reason"] for one in job.events("end")]
    assert reasons == ["hung", "finished"], f"{sweep.output}\n{job.output}\n{job.told}"
    (hang,) = job.hangs
    assert (hang["rank"], hang["section"], hang["step"]) == (last, "step", 30)
    found = job.summary()
    assert "in stand_gil" in found["line"]
    nodes = [found["ranks"][str(rank)]["node"] for rank in range(size)]
    assert nodes == ["n1"] * tasks + ["n2"] * tasks
    assert "in stand_gil" in job.stacks(last)
    assert (job.counts["hangs"], job.counts["restarts"], job.counts["failures"]) == (1, 1, 0)
    assert job.restarts == 0
    assert job.is_free()
