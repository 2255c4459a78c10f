"""What forge needs of Hydra's private parts."""

import os
import subprocess
import sys

import pytest
from contracts import contract, register_resolver
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from forge.compat import of_hydra, of_omegaconf


def test_set_singletons():
    """A job's process goes on with what the launcher's Hydra knew."""
    before = Singleton.get_state()
    name = "forge_test_contract"
    with contract(of_hydra.set_singletons):
        assert HydraConfig.instance().cfg is None
        register_resolver(name, lambda: 7)
        try:
            HydraConfig.instance().cfg = OmegaConf.create({"hydra": {}})
            state = Singleton.get_state()
            assert Plugins not in state["instances"]
            of_hydra.set_singletons(before)
            assert HydraConfig.instance().cfg is None
            assert not OmegaConf.has_resolver(name)
            of_hydra.set_singletons(state)
            assert HydraConfig.initialized()
            assert OmegaConf.create({"a": f"${{{name}:}}"}).a == 7
            assert Plugins.instance() is Plugins.instance()
        finally:
            of_hydra.set_singletons(before)


@pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.FAILED])
def test_outcome(status):
    """Also of a job that failed, without the lines that Hydra prints for it."""
    with contract(of_hydra.outcome):
        result = JobReturn(status=status)
        assert of_hydra.outcome(result) is None
        result.return_value = ValueError("wrong")
        assert of_hydra.outcome(result).args == ("wrong",)


@pytest.mark.parametrize("version", ["1.3.2", "1.4.0rc3"])
def test_the_contracts_hold_with_hydra(version):
    """The oldest that forge takes, and the candidate of the next one with its OmegaConf."""
    place = os.path.join(sys.prefix, "hydras", version)
    if not os.path.isdir(place):
        if os.environ.get("FORGE_REQUIRE_HYDRAS"):
            pytest.fail(f"hydra-core {version} is not in {place}: `make test` installs it there")
        pytest.skip(f"hydra-core {version} is not in {place}: `make test` installs it there")
    here = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(here))
    tests = [os.path.join(here, f"test_of_{one}.py") for one in ("hydra", "omegaconf")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    known = f"import hydra; assert hydra.__version__ == {version!r}, hydra.__version__"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([place, root])}
    subprocess.run([sys.executable, "-c", known], env=environment, check=True)
    done = subprocess.run(
        [*command, "-k", "not test_the_contracts_hold", *tests],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert of_omegaconf.__name__ in sys.modules
