"""Slurm starts the jobs of an array together; with `stagger_s` their tasks start apart."""

import contextlib

import pytest
from slurm_apps import BARE_CONF, SlurmApp

import forge

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TRAIN = """
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        pass

    if __name__ == "__main__":
        main()
"""


def test_the_later_job_waits_for_its_turn(cluster, tmp_path):
    """Nobody sees the start of an array in time to delay a part of it."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, BARE_CONF)) as app:
        sweep = app.run("kind=a,b", "hydra.launcher.stagger_s=4")
        assert sweep.returncode == 0, sweep.stdout
        jobs = forge.sweep(app.sweep_dir).jobs
        first, second = sorted(job.history()[0].began for job in jobs)
        assert second - first > 2
        logs = [path.read_text() for path in app.sweep_dir.glob(".submitit/*_log.*")]
        assert sum("since other jobs of the sweep start now" in log for log in logs) == 1, logs
