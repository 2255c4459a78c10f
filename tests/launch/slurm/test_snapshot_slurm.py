"""A job that waits in Slurm's queue runs the code of its submission, with `snapshot=true`."""

import contextlib
import subprocess

import pytest
from cluster import wait_for
from slurm_apps import BARE_CONF, SlurmApp

import forge
from forge.jobdir.job_state import State

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TRAIN = """
    import hydra

    WORD = "old"

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        return WORD

    if __name__ == "__main__":
        main()
"""


def test_an_edit_does_not_reach_a_job_in_the_queue(cluster, tmp_path):
    """Jobs wait there for days."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, BARE_CONF)) as app:
        subprocess.run(["git", "init"], cwd=app.folder, check=True, capture_output=True)
        options = ["hydra.launcher.snapshot=true", "hydra.launcher.wait=false"]
        options += ["+hydra.launcher.additional_parameters.hold=true"]
        sweep = app.run("kind=a", *options)
        assert sweep.returncode == 0, sweep.stdout
        script = app.folder / "train.py"
        script.write_text(script.read_text().replace('"old"', '"new"'))
        (job,) = forge.sweep(app.sweep_dir).jobs
        cluster.run("scontrol", "release", job.slurm_id)

        def is_done():
            (job,) = forge.sweep(app.sweep_dir).jobs
            return job.state is State.finished

        wait_for(is_done, "end of the job")
        rows = app.forge("status", "--csv", str(app.sweep_dir))
        assert rows.count("old") == 1, rows
