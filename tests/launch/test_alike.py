"""Jobs that fail alike before the first checkpoint hold the others back, if that is configured."""

import pytest
from sweeps import App

import forge
from forge.jobdir.job_state import State

MISTAKE = """
    if cfg.seed < 4 and not Path(__file__).with_name("corrected").exists():
        raise KeyError("train")
"""


@pytest.fixture
def app(tmp_path):
    app = App(tmp_path / "app", misbehave=MISTAKE)
    yield app
    app.close()


def states(app):
    return [job.state for job in forge.sweep(app.sweep_dir).jobs]


def test_jobs_that_fail_alike_hold_the_others_back(app):
    """A typo must not fail a hundred jobs one after the other."""
    sweep = app.run("seed=0,1,2,3", "hydra.launcher.n_jobs=1", "hydra.launcher.max_alike=2")
    assert sweep.returncode == 1
    assert states(app) == [State.failed, State.failed, State.queued, State.queued]
    said = sweep.stdout
    assert "2 jobs failed alike, and no job has saved a checkpoint yet: KeyError at " in said
    assert "train.py:" in said
    assert "(2) are held back (hydra.launcher.max_alike=2)" in said
    assert f"forge resume {app.sweep_dir}" in said
    assert "To resume (starts again: 2 failed; starts 2 that have not run yet):" in said
    (app.folder / "corrected").touch()
    app.forge("resume", str(app.sweep_dir))
    assert states(app) == [State.finished] * 4


def test_a_job_with_a_checkpoint_shows_that_the_code_is_right(app):
    """Then a few bad points of the sweep must not stop it."""
    options = ["hydra.launcher.n_jobs=1", "hydra.launcher.max_alike=2", "step_s=0"]
    assert app.run("seed=4,0,1,5", *options).returncode == 1
    assert states(app) == [State.finished, State.failed, State.failed, State.finished]


def test_without_the_option_there_is_a_notice(app):
    """A person who looks can stop the sweep."""
    sweep = app.run("seed=0,1,2,3", "hydra.launcher.n_jobs=1")
    assert states(app) == [State.failed] * 4
    assert sweep.stdout.count("hydra.launcher.max_alike=3 would hold the other jobs back") == 1
