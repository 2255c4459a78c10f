"""A job without a policy comes back as the site has it; one without a Run, as often as needed."""

import contextlib
import functools

import pytest
from cluster import wait_for
from rows import few
from slurm_apps import BARE_CONF, SlurmApp, urgent

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TRAIN = """
    import os, time
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        Path(cfg.gates, f"start {restarts}").touch()
        while restarts < cfg.holds:
            time.sleep(0.05)
        return "done"

    if __name__ == "__main__":
        main()
"""


def is_back(job, restarts):
    """Whether it is in the queue again, and its wrapper gone."""
    shown = job.shown
    return (shown["Restarts"], shown["JobState"]) == (str(restarts), "PENDING")


@pytest.fixture
def app(cluster, tmp_path):
    with contextlib.closing(
        SlurmApp(cluster, tmp_path / "app", TRAIN, "gates: ???\nholds: 1\n")
    ) as found:
        yield found


@pytest.mark.parametrize("partition", [pytest.param("low", marks=pytest.mark.proofs), "zero"])
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


@pytest.mark.parametrize("times", few(1, [1, 2]))
def test_a_function_without_a_run_finishes_however_often_it_is_preempted(cluster, tmp_path, times):
    """It has no progress to lack: only its budgets hold."""
    conf = f"{BARE_CONF}      requeue: {{max_no_progress: 1}}\n    holds: {times}\n"
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, conf)) as app:
        sweep = app.start("hydra.launcher.nodelist=n1")
        for start in range(times):
            app.wait_for_gate(f"start {start}", sweep)
            (job,) = app.jobs_by_place()
            urgent(cluster, tmp_path, "--nodelist=n1")
            wait_for(functools.partial(is_back, job, start + 1), "requeue")
            # Sooner than the wrapper has it, but not before Slurm's credential has expired.
            cluster.run("scontrol", "update", f"JobId={job.slurm_id}", "StartTime=now+7")
        assert sweep.wait() == 0, sweep.output
        assert (job.restarts, job.counts["preemptions"]) == (times, times)
