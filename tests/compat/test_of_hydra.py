"""What forge needs of Hydra's private parts."""

import pytest
from contracts import contract, register_resolver
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from forge.compat import of_hydra


@pytest.fixture
def _state_is_restored():
    Plugins.instance()  # stores configs in a singleton as its modules are imported, which is once
    instances, resolvers = Singleton._instances, BaseContainer._resolvers
    config = HydraConfig.instance().cfg
    Singleton._instances, BaseContainer._resolvers = dict(instances), dict(resolvers)
    yield
    Singleton._instances, BaseContainer._resolvers = instances, resolvers
    HydraConfig.instance().cfg = config


@pytest.mark.usefixtures("_state_is_restored")
def test_set_singletons():
    """A job's process starts with the state of the launcher's Hydra."""
    name = "forge_test_contract"
    with contract(of_hydra.set_singletons):
        before = Singleton.get_state()
        register_resolver(name, lambda: 7)
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": {}})
        state = Singleton.get_state()
        assert Plugins not in state["instances"]
        of_hydra.set_singletons(before)
        assert not HydraConfig.initialized()
        assert not OmegaConf.has_resolver(name)
        of_hydra.set_singletons(state)
        assert HydraConfig.initialized()
        assert OmegaConf.create({"a": f"${{{name}:}}"}).a == 7
        assert Plugins.instance() is Plugins.instance()


@pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.FAILED])
def test_outcome(status):
    """Also of a job that failed, without the lines that Hydra prints for it."""
    with contract(of_hydra.outcome):
        result = JobReturn(status=status)
        assert of_hydra.outcome(result) is None
        result.return_value = ValueError("wrong")
        assert of_hydra.outcome(result).args == ("wrong",)
