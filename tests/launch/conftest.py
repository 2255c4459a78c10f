"""Apps to sweep over, and what their undisturbed jobs end with."""

import pytest
from harness import made_once
from sweeps import App, SweptJob


@pytest.fixture
def app(tmp_path):
    app = App(tmp_path / "user's project")  # a name that has to be quoted
    yield app
    app.close()


@pytest.fixture(scope="session")
def undisturbed(shared_folder):
    """Jobs of the standard app that nobody interrupted: seed 3 at both rates."""

    def make(folder):
        App(folder / "app").finish("lr=0.1,0.2", "step_s=0")

    sweep = made_once(shared_folder / "undisturbed_sweep", make) / "app" / "sweep"
    return {"0.1": SweptJob(sweep / "0"), "0.2": SweptJob(sweep / "1")}
