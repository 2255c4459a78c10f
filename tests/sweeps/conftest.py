"""A sweep with jobs that ended in different ways, made once for all tests that only look at it."""

import pytest
from harness import made_once
from sweeps import TRAIN, App

MISBEHAVE = """
    if cfg.mode == "raises" and step == 17:
        raise ValueError("planted error")
    if cfg.mode == "dies" and step == 25 and RESTARTS == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.mode == "exits" and step == 12:
        os._exit(9)
"""
LOG = "run.log(loss=loss)\n"
TRAINING = TRAIN.replace(LOG, f"{LOG}{' ' * 16}if step % 10 == 0: run.log(val_acc=step / 100)\n")
CONF = """
    defaults: [{resilience: default}, _self_]
    lr: 0.1
    seed: 3
    steps: 40
    step_s: 0
    mode: ends
    resilience:
      checkpoint: {every_steps: 10, every_s: null}
"""


@pytest.fixture(scope="session")
def swept(shared_folder):
    """Job 0 ended, 1 raised, 2 was killed once and ended, 3 left by os._exit."""

    def make(folder):
        app = App(folder / "app", TRAINING, CONF, misbehave=MISBEHAVE)
        assert app.run("mode=ends,raises,dies,exits", "lr=0.2").returncode == 1

    return made_once(shared_folder / "looked_at", make) / "app" / "sweep"


@pytest.fixture
def app(tmp_path):
    app = App(tmp_path / "app", TRAINING, CONF, misbehave=MISBEHAVE)
    yield app
    app.close()
