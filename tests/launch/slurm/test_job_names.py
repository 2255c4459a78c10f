"""The names of jobs in the queue: the number of each, and its overrides."""

import contextlib

import pytest
from cluster import wait_for
from slurm_apps import BARE_CONF, SlurmApp

from forge.launch.slurm.sbatch import job_name
from forge.launch.slurm.slurm_options import SlurmOptions
from forge.slurm import client

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TRAIN = """
    import time
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        while not Path(cfg.gates, "go").exists():
            time.sleep(0.02)

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def app(cluster, tmp_path):
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, BARE_CONF)) as app:
        yield app


def names(app):
    return set(app.cluster.run("squeue", "--noheader", "--array", "--format=%j").split())


def test_squeue_shows_which_job_of_an_array_is_which(app):
    """The jobs of an array have the same name until each of them starts."""
    sweep = app.start("kind=a,b")
    wait_for(lambda: names(app) == {"train_0:kind=a", "train_1:kind=b"}, "the names")
    (app.gates / "go").touch()
    assert sweep.wait() == 0, sweep.output


def test_a_single_job_has_its_name_from_the_start(app):
    """It can wait in the queue for days."""
    script = app.run("kind=a", "hydra.launcher.dry_run=true").stdout
    assert "#SBATCH --job-name=train_0:gates=_/" in script


def test_a_job_runs_if_it_cannot_be_named(monkeypatch):
    """The name is only for people."""
    monkeypatch.setenv("PATH", "")
    client.rename("1", "train_0")


def test_a_long_name_is_cut():
    """Twenty overrides would fill the listing of the queue."""
    assert len(job_name(SlurmOptions(), 3, "x" * 2000)) == 100
    assert job_name(SlurmOptions(name="train"), 3, "") == "train_3"
    assert job_name(SlurmOptions(name="train"), 3, "a='b c' d=[1,2]") == "train_3:a=_b,c_,d=_1,2_"
