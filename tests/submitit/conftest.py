"""What the submitted functions return if nobody stops them."""

import light
import pytest
import submitted

import forge


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What a job that nobody stops returns, by its task."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for task in (submitted.train,):
        policy = light.POLICY | {"checkpoint": {"dir": str(folder / task.__name__ / "saves")}}
        found[task] = forge.Checkpointable(task)(folder / task.__name__, policy)
    return found
