"""Apps to sweep over, and what their undisturbed jobs end with."""

import pytest
from sweeps import App


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "user's project")  # a name that has to be quoted


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Jobs of the standard app that nobody interrupted: seed 3 at both rates."""
    app = App(tmp_path_factory.mktemp("undisturbed") / "app")
    app.finish("lr=0.1,0.2", "step_s=0")
    return {"0.1": app.job(0), "0.2": app.job(1)}
