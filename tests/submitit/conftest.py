"""Jobs find the tests' own functions, and know nothing of an outer job."""

import os

import light
import pytest
import submitted

import forge


@pytest.fixture(scope="module")
def own_environment():
    """For jobs that are submitted once for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("SLURM", "SUBMITIT", "SBATCH"))]:
            patch.delenv(name)
        inherited = [one for one in [os.environ.get("PYTHONPATH")] if one]
        patch.setenv("PYTHONPATH", os.pathsep.join([*inherited, light.PYTHONPATH]))
        yield patch


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What a job that nobody stops returns, by its task."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for task in (submitted.train,):
        policy = light.POLICY | {"checkpoint": {"dir": str(folder / task.__name__ / "saves")}}
        found[task] = forge.Checkpointable(task)(folder / task.__name__, policy)
    return found
