"""A sweep with jobs that ended in different ways, made once for all tests that only look at it."""

import pytest
from harness import made_once
from looked_at import CONF, MISBEHAVE, TRAINING
from sweeps import App


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
