"""A config that Hydra's sweeper has composed for its check is not composed again."""

import pickle

import cloudpickle
import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from forge.launch import compose_cache, payload

Plugins.instance()  # as in suites.py
OVERRIDES = [[f"lr={lr}", "extra=a" if lr > 1 else "extra=b"] for lr in (1, 2, 3)]


@pytest.fixture
def composed(monkeypatch):
    """The overrides of every config that Hydra composes for a job, in their order."""
    found = []
    original = ConfigLoaderImpl.load_sweep_config

    def load_sweep_config(self, master_config, sweep_overrides):
        found.append(list(sweep_overrides))
        return original(self, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load_sweep_config)
    return found


@pytest.fixture
def sweep(hydra_restore_singletons, hydra_sweep_runner, tmp_path):
    """Runs a sweep over three jobs in this process; what each returned, in its order."""

    def run(launcher, *overrides):
        sweep = hydra_sweep_runner(
            calling_file=None,
            calling_module="hydra.test_utils.a_module",
            task_function=lambda cfg: OmegaConf.to_container(cfg),
            config_path="configs",
            config_name="compose.yaml",
            overrides=[f"hydra/launcher={launcher}", "+a=0,1,2", *overrides],
            temp_dir=tmp_path / "sweep",
        )
        with sweep:
            return sweep.returns[0]

    return run


@pytest.fixture
def context(hydra_restore_singletons, tmp_path):
    """(Hydra's context, the config of a sweep), without its launcher."""
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "a.yaml").write_text("width: 1\n")
    (tmp_path / "extra" / "b.yaml").write_text("width: ${lr}\nwhen: ${now:%f}\n")
    (tmp_path / "conf.yaml").write_text("defaults: [{extra: a}, _self_]\nlr: 0\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config(
            "conf", [], run_mode=RunMode.MULTIRUN, with_log_configuration=False
        )
        found = HydraContext(config_loader=hydra.config_loader, callbacks=None)
        compose_cache.watch(found)
        yield found, config


def test_a_local_sweep_composes_each_job_once(sweep, composed):
    """Composing takes most of the time in which a sweep of many jobs is launched."""
    sweep("local", "hydra.launcher.progress=none")
    assert composed == [["+a=0"], ["+a=1"], ["+a=2"]]


def test_a_slurm_sweep_composes_each_job_once(sweep, composed):
    with pytest.raises(SystemExit) as ended:
        sweep("slurm", "hydra.launcher.dry_run=true")
    assert ended.value.code == 0
    assert composed == [["+a=0"], ["+a=1"], ["+a=2"]]


def test_jobs_get_the_same_without_it(sweep, composed, monkeypatch):
    """What the sweeper has composed is the launcher's to change, and nobody else's."""

    def told():
        returned = sweep("local", "hydra.launcher.progress=none")
        return [(one.return_value, one.cfg, one.hydra_cfg, one.overrides) for one in returned]

    with_it = told()
    monkeypatch.setattr(compose_cache, "watch", lambda context: None)
    assert told() == with_it
    assert len(composed) == 3 + 6


def test_a_remembered_config_is_the_one_that_would_be_composed(context, composed):
    context, config = context
    for overrides in OVERRIDES:
        context.config_loader.load_sweep_config(config, overrides)
    for overrides in OVERRIDES:
        kept = compose_cache.take(context, config, list(overrides))
        fresh = compose_cache.take(context, config, list(overrides))
        assert fresh is not kept, "it is for whoever takes it alone"
        assert pickle.dumps(fresh) == pickle.dumps(kept)
    assert len(composed) == 3 + 3


def test_another_config_of_a_sweep_is_another(context, composed):
    context, config = context
    context.config_loader.load_sweep_config(config, OVERRIDES[0])
    other = config.copy()
    other.hydra.overrides.hydra.append("hydra.job.name=another")
    assert compose_cache.take(context, other, OVERRIDES[0]).hydra.job.name == "another"
    assert len(composed) == 2


def test_beyond_the_most_that_is_kept_jobs_are_composed_again(context, composed, monkeypatch):
    """A sweep of a hundred thousand jobs must not fill the login node's memory."""
    monkeypatch.setattr(compose_cache, "_MOST", 1)
    context, config = context
    for overrides in OVERRIDES:
        context.config_loader.load_sweep_config(config, overrides)
    found = [compose_cache.take(context, config, overrides).lr for overrides in OVERRIDES]
    assert found == [1, 2, 3]
    assert len(composed) == 3 + 2


def test_what_is_pickled_has_forgotten(context):
    """The context goes to every job: with all configs of the sweep it would be huge."""
    context, config = context
    before = cloudpickle.dumps(context)
    for overrides in OVERRIDES:
        context.config_loader.load_sweep_config(config, overrides)
    assert len(cloudpickle.dumps(context)) == len(before)
    assert type(pickle.loads(before).config_loader) is ConfigLoaderImpl
    shared = pickle.loads(payload.Shared(len, context).common)
    assert type(shared["context"].config_loader) is ConfigLoaderImpl


def test_the_loader_is_watched_once_and_is_what_it_was_otherwise(context):
    context, _ = context
    watched = context.config_loader
    compose_cache.watch(context)
    assert context.config_loader is watched
    assert watched.list_groups("") == watched._loader.list_groups("")
