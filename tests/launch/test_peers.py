"""What becomes of one sweep, with a job killed, under the launchers that people use today."""

import subprocess
import sys

import pytest
from sweeps import App, assert_same_job

pytestmark = [pytest.mark.proofs, pytest.mark.slow]
KILLED_ONCE = """
    if step == 17 and cfg.lr == 0.1:
        once = Path(HydraConfig.get().runtime.output_dir, "killed")
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def sweep(app: App, launcher: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "train.py", "-m", f"hydra/launcher={launcher}", "step_s=0"]
    command += [f"hydra.sweep.dir={app.sweep_dir}", "lr=0.1,0.2"]
    return subprocess.run(
        command, cwd=app.folder, text=True, timeout=200, capture_output=True, check=False
    )


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "app", misbehave=KILLED_ONCE)


def test_local_finishes_both_with_the_same_bits(app, undisturbed):
    """The killed job resumes from its last checkpoint, by itself."""
    assert sweep(app, "local").returncode == 0
    assert_same_job(app.job(0), undisturbed["0.1"])
    assert_same_job(app.job(1), undisturbed["0.2"])


def test_basic_dies_with_the_job_and_never_runs_the_next(app):
    """One process for everything: what kills one job kills the sweep."""
    assert sweep(app, "basic").returncode == -9
    assert not (app.job(0).directory / "weights.pt").exists()
    assert not app.job(1).directory.exists()


def test_submitit_local_loses_the_job_and_starts_nothing_again(app):
    """It notices, at the end, that the job has produced no output."""
    done = sweep(app, "submitit_local")
    assert done.returncode == 1
    assert "has not produced any output" in done.stderr + done.stdout
    assert not (app.job(0).directory / "weights.pt").exists()
    assert app.job(0).attempts == 1
