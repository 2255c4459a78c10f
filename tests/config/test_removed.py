"""A key that was removed: an error in a user's config, a notice in the files of a waiting job."""

import pickle

import pytest
from hydra_apps import App
from omegaconf import OmegaConf
from plans import planned

from forge import messages
from forge.config import removed, schema
from forge.config.loading import load
from forge.config.removed import REMOVED, Removed
from forge.config.schema import CheckAction, NanAction
from forge.errors import ConfigError
from forge.hydra_app.hints import hints_for
from forge.jobdir import config_file, plan
from forge.launch import task
from forge.submitit.checkpointable import Checkpointable

SHAPES = {
    "checks.old": Removed("Use a command."),
    "checks.*.action": Removed("Set the check itself.", is_now_its_group=True),
    "checks.*.threshold": Removed("It is a constant."),
}


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
    assert REMOVED[pattern].instead in problem
    assert hints_for([key]) == [problem]


def test_a_group_that_was_removed_is_one_problem(monkeypatch):
    """The error does not list the keys that were set in the group."""
    monkeypatch.setattr(removed, "REMOVED", SHAPES)
    with pytest.raises(ConfigError) as refused:
        load({"checks": {"old": {"action": "warn", "threshold": 1}}})
    assert refused.value.problems == [
        "`resilience.checks.old`: there is no such key any more. Use a command."
    ]


def test_the_policy_of_a_job_that_waits_is_read_without_removed_keys(monkeypatch):
    """A value of an older shape is converted to the present shape; the input is not modified."""
    monkeypatch.setattr(removed, "REMOVED", SHAPES)
    old = {"action": "warn", "threshold": 2.0}
    given = {"enabled": True, "checks": {"old": dict(old), "disk": dict(old), "gpu": "halt"}}
    kept, names = removed.without(given)
    assert kept == {"enabled": True, "checks": {"disk": "warn", "gpu": "halt"}}
    assert names == ["checks.old", "checks.disk.threshold"]  # the action is not ignored
    assert given["checks"]["disk"] == old
    assert removed.without(kept) == (kept, [])


def test_the_checks_of_a_job_that_waits_keep_their_actions():
    """Earlier versions had other checks, and limits for each; empty groups are dropped."""
    old = {"disk": {"action": "halt", "threshold": 0.0}, "ecc": {"action": "refuse"}}
    kept, _ = removed.without({"health": {"checks": old | {"shm": {"threshold": 8.0}}}})
    assert kept == {"health": {"checks": {"disk": "halt"}}}
    assert load(kept).health.checks["disk"] is CheckAction.halt


def test_a_plan_of_the_version_before_is_read(tmp_path):
    """The wrapper of a job that waited in the queue reads the plan of an older version."""
    content = planned().to_json()
    content["requeue"]["max_unfair"] = 10
    content["requeue"]["no_progress_limit"] = content["requeue"].pop("max_no_progress")
    content["lead_s"] = content.pop("warning_s")
    content["place"] = content.pop("inode")
    assert plan.from_json(content, "plan.json") == planned()


class Reduced:
    """Pickles like a member of an enum."""

    def __init__(self, kind, value):
        self.reduced = kind, (value,)

    def __reduce_ex__(self, protocol):
        return self.reduced


def test_a_task_that_an_earlier_version_gave_to_submitit_is_read(said, monkeypatch):
    """submitit pickles the task; its policy has classes that this version no longer has."""
    submitted = Checkpointable(print, {"nan": {"action": "halt"}})
    for name in removed.CLASSES:
        monkeypatch.setattr(
            schema, name, type(name, (), {"__module__": schema.__name__}), raising=False
        )
    checks = schema.ChecksConfig()
    checks.disk, checks.ecc = schema.CheckConfig(), schema.CheckConfig()
    checks.disk.action, checks.ecc.action = CheckAction.halt, CheckAction.warn
    submitted.policy.health.checks = checks
    submitted.policy.checkpoint.on_foreign = schema.OnForeign()
    submitted.policy.checkpoint.when_busy = Reduced(schema.WhenBusy, "skip")
    submitted.policy.signal.lead_s = 30.0
    submitted.policy.slurm = schema.SlurmConfig()
    submitted.policy.slurm.timeout_min, submitted.policy.slurm.qos = 5, None
    data = pickle.dumps(vars(submitted))  # as the earlier version pickled it
    monkeypatch.undo()
    with monkeypatch.context() as patched:
        patched.setattr(messages, "warn", said.append)
        later = Checkpointable.__new__(Checkpointable)
        later.__setstate__(pickle.loads(data))
    policy = later.policy
    assert policy.nan.action is NanAction.halt
    assert policy.health.checks["disk"] is CheckAction.halt
    assert policy.slurm == {"timeout_min": 5}
    assert policy.signal.warning_s == 30.0
    assert policy.checkpoint.on_pending_save is schema.OnPendingSave.skip
    assert not hasattr(policy.checkpoint, "on_foreign")
    (notice,) = said
    assert "`resilience.checkpoint.on_foreign`" in notice


def test_the_config_that_a_job_was_submitted_with_is_read(said):
    """main gets the policy without the removed key, so `forge.Run(cfg.resilience)` accepts it."""
    config = OmegaConf.create({"lr": 1, "resilience": {"hang": {"factor": 3, "start_s": 60}}})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    task._drop_removed_keys(config)
    assert load(config.resilience).hang.start_s == 60
    assert config == {"lr": 1, "resilience": {"hang": {"start_s": 60}}}
    (notice,) = said
    assert "no longer exist are ignored: `resilience.hang.factor`." in notice
    task._drop_removed_keys(config)
    assert len(said) == 1


def test_the_notice_names_every_ignored_key_or_its_group_in_one_short_line(said):
    """The policy of an earlier version has sixty keys that no longer exist."""
    checks = ["disk", "gpu", *(key.split(".")[2] for key in REMOVED if key.count(".") == 2)]
    limits = {"action": "warn", "threshold": 1.0, "timeout_s": 60.0}
    old = {
        "health": {"checks": {name: dict(limits) for name in checks}},
        "hang": {"factor": 3, "min_s": 300},
        "checkpoint": {"on_foreign": "warn"},
    }
    removed.notify(removed.without(old)[1])
    (notice,) = said
    assert notice.partition("ignored: ")[2] == (
        "`resilience.health.checks.*.threshold`, `resilience.health.checks.*.timeout_s`,"
        f" {len(checks) - 2} keys of `resilience.health.checks`, `resilience.hang.factor`,"
        " `resilience.hang.min_s`, `resilience.checkpoint.on_foreign`."
    )


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
