"""A job whose config has no `resilience`: what Slurm stops comes back as the site has it."""

import contextlib

import pytest
from jobs import SlurmApp, urgent

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TRAIN = """
    import os, time
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        Path(cfg.gates, f"start {restarts}").touch()
        while restarts == "0":
            time.sleep(0.05)
        return "done"

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def app(cluster, tmp_path):
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, "gates: ???\n")) as found:
        yield found


@pytest.mark.parametrize("partition", ["low", "zero"])
def test_a_preempted_job_without_a_policy_comes_back_where_slurm_brings_it_back(
    app, partition, tmp_path
):
    """JobRequeue=1 is the site's word on it, whether there is a grace time or not."""
    sweep = app.start(f"hydra.launcher.partition={partition}", "hydra.launcher.nodelist=n1")
    app.wait_for_gate("start 0", sweep)
    urgent(app.cluster, tmp_path, "--nodelist=n1")
    assert sweep.wait() == 0, sweep.output
    (job,) = app.jobs_by_place()
    assert (app.gates / "start 1").exists()
    assert job.restarts == 1
