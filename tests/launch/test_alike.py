"""Jobs that fail alike before the first checkpoint hold the others back, if that is configured."""

import pytest
from sweeps import App

import forge
from forge.errors import Reason
from forge.jobdir import verdict
from forge.jobdir.job_files import forge_dir
from forge.jobdir.job_state import State
from forge.jobdir.verdict import Verdict
from forge.launch.alike import Alike
from forge.launch.local.queue import QueuedJob

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
    sweep = app.run("seed=0,1,2", "hydra.launcher.n_jobs=1", "hydra.launcher.max_alike=2")
    assert sweep.returncode == 1
    assert states(app) == [State.failed, State.failed, State.queued]
    said = sweep.stdout
    assert "2 jobs failed alike, and no job has saved a checkpoint yet: KeyError at " in said
    assert "train.py:" in said
    assert "(1) are held back (hydra.launcher.max_alike=2)" in said
    assert f"forge resume {app.sweep_dir}" in said
    assert "To resume (starts again: 2 failed; starts 1 that have not run yet):" in said
    (app.folder / "corrected").touch()
    app.forge("resume", str(app.sweep_dir))
    assert states(app) == [State.finished] * 3


@pytest.fixture
def failed(tmp_path):
    """Three jobs that failed at the same line, and one that waits."""
    jobs = []
    for number in range(4):
        directory = tmp_path / str(number)
        forge_dir(directory).mkdir(parents=True)
        jobs.append(QueuedJob(number, "", directory))
        if number < 3:
            frame = "train.py:7 in main"
            verdict.write(directory, Verdict(Reason.failed, "KeyError: 'x'", 1, frame=frame))
            jobs[-1].state, jobs[-1].reason = State.failed, Reason.failed
    return jobs


def test_a_job_with_a_checkpoint_shows_that_the_code_is_right(failed, tmp_path):
    """Then a few bad points of the sweep must not stop it."""
    (tmp_path / "3/checkpoints/step_4").mkdir(parents=True)
    alike = Alike(tmp_path, max_alike=2)
    assert alike.check(failed) == ""
    assert not alike.is_holding


def test_without_the_option_there_is_a_notice(failed, tmp_path):
    """A person who looks can stop the sweep."""
    alike = Alike(tmp_path)
    assert alike.check(failed[:2]) == ""
    told = "3 jobs failed alike, and no job has saved a checkpoint yet: KeyError at train.py:7"
    said = alike.check(failed)
    assert said.startswith(told)
    assert "hydra.launcher.max_alike=3 would hold the other jobs back" in said
    assert not alike.is_holding
    assert alike.check(failed) == ""
