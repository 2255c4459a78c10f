"""How a launcher ends before any job was started."""

import pytest
from omegaconf import OmegaConf

from forge.errors import ConfigError, Exit, ExitCode
from forge.hydra_app import hints
from forge.launch import opening


@pytest.fixture
def config(monkeypatch, tmp_path):
    """Of a sweep; Hydra's logging is left alone."""
    monkeypatch.setattr(opening, "configure_log", lambda *arguments: None)
    monkeypatch.setattr(opening, "setup_globals", lambda: None)
    content = {"hydra_logging": None, "verbose": False, "sweep": {"dir": str(tmp_path)}}
    return OmegaConf.create({"hydra": content})


def test_ctrl_c_while_configs_are_composed_ends_without_a_traceback(config, caplog):
    """A sweep of a thousand jobs composes for a minute; nothing has begun, nothing is lost."""
    caplog.set_level("INFO")
    with pytest.raises(Exit) as end, opening.exit_on_error(config):
        raise KeyboardInterrupt
    assert end.value.code == ExitCode.INTERRUPTED
    assert "no job was started" in caplog.text


def test_no_hint_for_hydra_s_errors_follows_an_error_of_ours(config, monkeypatch, caplog):
    """\"Add a preset" below a wrong option of the launcher leads away from it."""
    monkeypatch.setattr(hints, "pending_keys", ["nan.action"])
    with pytest.raises(Exit) as end, opening.exit_on_error(config):
        raise ConfigError(["`hydra.launcher.njobs=2`: there is no such key."], "The launcher")
    assert end.value.code == ExitCode.BAD_CONFIG
    assert hints.pending_keys == []
