"""Jobs of a cluster that fail alike hold those back that wait in the queue."""

import contextlib

import pytest
from cluster import wait_for
from slurm_apps import BARE_CONF, SlurmApp

import forge
from forge.jobdir.job_state import State

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TRAIN = """
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        if not Path(cfg.gates, "corrected").exists():
            raise KeyError("train")

    if __name__ == "__main__":
        main()
"""


def test_the_others_are_held_in_the_queue_and_released_by_forge_resume(cluster, tmp_path):
    """They keep their place there, and no accounting is needed."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, BARE_CONF)) as app:
        options = ["hydra.launcher.array_parallelism=1", "hydra.launcher.max_alike=2"]
        sweep = app.run("kind=a,b,c,d,e", *options)
        assert sweep.returncode == 1, sweep.stdout
        assert "(hydra.launcher.max_alike=2). Correct the cause" in sweep.stdout
        jobs = forge.sweep(app.sweep_dir).jobs
        waiting = [job for job in jobs if job.state is State.queued]
        assert [job.state for job in jobs if job not in waiting] == [State.failed] * (
            5 - len(waiting)
        )
        assert waiting, sweep.stdout
        reasons = cluster.run("squeue", "--noheader", "--array", "--format=%r").split()
        assert reasons == ["JobHeldUser"] * len(waiting)

        (app.gates / "corrected").touch()
        said = app.forge("resume", str(app.sweep_dir))
        assert said.count("was held, and is released") == len(waiting)

        def are_done():
            return all(job.state is State.finished for job in forge.sweep(app.sweep_dir).jobs)

        wait_for(are_done, "end of all jobs", 250)
