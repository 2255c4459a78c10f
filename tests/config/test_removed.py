"""A key that was removed: an error in a user's config, a notice in the files of a waiting job."""

import pickle

import pytest
from hydra_apps import App
from omegaconf import OmegaConf

from forge import messages
from forge.config import removed
from forge.config.loading import load
from forge.config.removed import REMOVED
from forge.config.schema import NanAction
from forge.errors import ConfigError
from forge.hydra_app.hints import hints_for
from forge.jobdir import config_file
from forge.launch import task
from forge.submitit.checkpointable import Checkpointable


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(messages, "warn", found.append)
    return found


@pytest.mark.parametrize("pattern", REMOVED)
def test_a_removed_key_in_a_users_config_is_an_error_that_says_what_replaces_it(pattern):
    """The key can be in a file, or on the command line, where Hydra refuses it first."""
    key = pattern.replace("*", "disk")
    with pytest.raises(ConfigError) as refused:
        load(nested(key, 1))
    (problem,) = refused.value.problems
    assert f"`resilience.{key}`: there is no such key any more" in problem
    assert REMOVED[pattern] in problem
    assert hints_for([key]) == [problem]


def test_a_group_that_was_removed_is_one_problem():
    """The error does not list the keys that were set in the group."""
    with pytest.raises(ConfigError) as refused:
        load({"health": {"checks": {"ecc": {"action": "warn", "threshold": 1}}}})
    (problem,) = refused.value.problems
    assert problem.startswith("`resilience.health.checks.ecc`: there is no such key any more.")


def test_a_task_that_an_earlier_version_gave_to_submitit_is_read(said):
    """submitit pickles the task; its policy can have keys that this version no longer has."""
    state = Checkpointable(print, {"nan": {"action": "halt"}}).__getstate__()
    state["policy"]["hang"]["factor"] = 3
    later = pickle.loads(pickle.dumps(Checkpointable(print)))
    later.__setstate__(state)
    assert later.policy.nan.action is NanAction.halt
    (notice,) = said
    assert "ignored: `resilience.hang.factor`." in notice


def test_the_policy_of_a_job_that_waits_is_read_without_removed_keys():
    """The value that was given is not changed, and a second reading finds nothing."""
    given = {"enabled": True, "hang": {"factor": 3}, "health": {"checks": {"ecc": {"action": 1}}}}
    kept, names = removed.without(given)
    assert kept == {"enabled": True}  # an empty group would be the value of a check
    assert names == ["hang.factor", "health.checks.ecc"]
    assert given["hang"] == {"factor": 3}
    assert removed.without(kept) == (kept, [])
    assert load(kept) == load(None)


def test_the_config_that_a_job_was_submitted_with_is_read(said):
    """main gets the policy without the removed key, so `forge.Run(cfg.resilience)` accepts it."""
    config = OmegaConf.create({"lr": 1, "resilience": {"hang": {"factor": 3, "start_s": 60}}})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    task.drop_removed_keys(config)
    assert load(config.resilience).hang.start_s == 60
    assert config == {"lr": 1, "resilience": {"hang": {"start_s": 60}}}
    (notice,) = said
    assert "no longer exist are ignored: `resilience.hang.factor`." in notice
    task.drop_removed_keys(config)
    assert len(said) == 1


def test_the_notice_names_a_few_of_many_keys(said):
    """The policy of an earlier version can have dozens of keys that no longer exist."""
    old = {"health": {"checks": {f"old_{n}": {"threshold": 1.0} for n in range(20)}}}
    removed.notify(removed.without(old)[1])
    (notice,) = said
    assert "`resilience.health.checks.old_0.threshold`" in notice
    assert notice.endswith(" and 12 more.")


def test_a_job_that_was_started_before_resumes_with_a_notice(tmp_path):
    """This version would refuse the job's stored config in a user's file."""
    app = App(tmp_path / "app")
    assert app.run("hydra.run.dir=job", "signal_in=3").returncode == 143
    path = app.folder / "job" / ".forge" / "config.yaml"
    tree = config_file.read(path)
    tree["resilience"]["hang"]["min_s"] = 300.0
    del tree["resilience"]["slurm"]["comment"]  # a key that this version added
    config_file.write(path, tree)
    resumed = app.run("hydra.run.dir=job")
    assert resumed.returncode == 0, resumed.stdout
    assert resumed.stdout.count("ignored: `resilience.hang.min_s`.") == 1
    assert "Later changes of config files" not in resumed.stdout
