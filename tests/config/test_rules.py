"""Every rule of the policy, one case each: the error that a broken rule raises.

One module, since most of it is one table of rules, and all cases share its helpers.
"""

import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf
from repository import ROOT

from forge.config.conversion import known_keys
from forge.config.loading import from_overrides, load
from forge.config.rules import directory_problem
from forge.config.schema import (
    SIGNALS,
    CheckAction,
    CheckpointConfig,
    NanAction,
    NanConfig,
    Policy,
    SignalAction,
    SignalConfig,
)
from forge.config.unknown import nearest_key, suggestion
from forge.errors import ConfigError, ExitCode
from forge.hydra_app.hints import hints_for

NAN = float("nan")
INF = float("inf")


def problems(policy, **limits) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(policy, **limits)
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def nested(key: str, value) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


INTERVAL = "above 0 and finite. To switch it off, set it to null"
WORDS = "warn | skip | rollback | halt | raise"
CHECK_ACTIONS = "expected ignore | warn | refuse | exclude_node | halt"
# key, value, a part of the error message
SINGLE = [
    # intervals
    ("checkpoint.every_steps", 0, INTERVAL),
    ("checkpoint.every_steps", -5, INTERVAL),
    ("checkpoint.every_s", 0, INTERVAL),
    ("checkpoint.every_s", -0.5, INTERVAL),
    ("checkpoint.every_s", NAN, INTERVAL),
    ("checkpoint.every_s", INF, INTERVAL),
    ("checkpoint.keep_every_steps", 0, INTERVAL),
    # least values
    ("checkpoint.keep_last", 0, "at least 1. The newest checkpoint is always kept"),
    ("checkpoint.best.keep", 0, "at least 1. To keep none set `best.metric` to null"),
    ("checkpoint.best.mode", "least", "expected min | max, found 'least'"),
    (
        "checkpoint.best.metric",
        " ",
        "is empty. Set it to the name of a value that you pass to run.log, or to null",
    ),
    ("checkpoint.best.metric", True, "expected a string, found a boolean"),
    ("health.exclude_h", 0, "above 0 and finite"),
    ("health.commands.nhc.run", [], "is empty; expected a command such as `[nhc, -a]`"),
    (
        "health.commands.nhc.rum",
        ["nhc"],
        "a health check command has no such key. Its keys are resilience.health.",
    ),
    ("health.commands.nhc", "nhc", "a health check command has no such key"),
    ("hang.timeout_s", 0, "above 0 and finite. With null, forge"),
    ("hang.start_s", INF, "above 0 and finite"),
    ("hang.max_restarts", -1, "at least 0. 0 means no restart"),
    ("hang.action", "exclude_node", "expected ignore | warn | restart | halt"),
    ("nan.max_consecutive", 0, "at least 1"),
    ("nan.rollback.steps_back", -1, "at least 0"),
    ("nan.rollback.max_rollbacks", -1, "at least 0"),
    ("nan.rollback.lr_scale", 0, "above 0 and finite. 1 keeps the rate"),
    ("nan.rollback.lr_scale", NAN, "above 0 and finite. 1 keeps the rate"),
    # signals
    ("signal.name", "KILL", "expected TERM | INT | HUP | USR1 | USR2, found 'KILL'"),
    ("exec.signal", "USR3", "expected TERM | INT | HUP | USR1 | USR2"),
    ("signal.actions.KILL", "stop", "unknown signal. A policy can name TERM, INT, HUP"),
    ("signal.actions.TERM", "stopp", "expected stop | requeue | save | ignore, found 'stopp'"),
    ("signal.actions.TERM", None, "expected stop | requeue | save | ignore, found None"),
    ("signal.warning_s", 0, "Set it to the seconds that a save takes"),
    ("signal.warning_s", -1, "Set it to the seconds that a save takes"),
    ("signal.warning_s", NAN, "Set it to the seconds that a save takes"),
    ("signal.warning_s", INF, "above 0 and finite"),
    ("shutdown.timeout_s", -1, "at least 0. 0 never forces an exit"),
    ("shutdown.timeout_s", NAN, "at least 0. 0 never forces an exit"),
    ("shutdown.timeout_s", INF, "at least 0. 0 never forces an exit"),
    # words
    ("nan.action", "skipp", f"expected {WORDS}, found 'skipp'"),
    ("nan.action", 3, f"expected {WORDS}, found 3"),
    ("nan.action", None, f"expected {WORDS}, found None"),
    ("nan.action", {}, f"expected {WORDS}, found {{}}"),
    ("nan.action", "???", f"expected {WORDS}, found '???'"),
    ("checkpoint.on_pending_save", "half", "expected wait | skip"),
    ("checkpoint.verify", "half", "expected full | size | none"),
    ("requeue.on_code_change", "ask", "expected warn | refuse"),
    ("health.checks.gpu", "exclude", CHECK_ACTIONS),
    ("health.checks.gpu", None, CHECK_ACTIONS),
    ("health.checks.fan", "warn", "there is no such key"),
    ("health.checks", ["disk"], "expected a group of keys"),
    ("health.checks.disk", "???", CHECK_ACTIONS),
    # booleans where a word or number is expected: YAML reads off, on, yes and no so
    ("nan.action", False, f"expected {WORDS}, found a boolean"),
    ("signal.actions.USR1", False, "expected stop | requeue | save | ignore, found a boolean"),
    ("checkpoint.every_steps", True, "expected a whole number, found a boolean"),
    ("checkpoint.every_s", False, "expected a number, found a boolean"),
    ("checkpoint.every_s", "10m", "expected a number, found '10m'"),
    ("checkpoint.dir", True, "expected a string, found a boolean"),
    ("health.checks.gpu", False, f"{CHECK_ACTIONS}, found a boolean"),
    # numbers
    ("checkpoint.every_steps", 2.5, "expected a whole number, found a fraction"),
    ("checkpoint.every_steps", "ten", "expected a whole number, found 'ten'"),
    ("checkpoint.keep_last", 1.5, "expected a whole number, found a fraction"),
    ("nan.max_consecutive", NAN, "expected a whole number"),
    ("nan.max_consecutive", None, "expected a whole number, found None"),
    ("signal.warning_s", "2min", "expected a number, found '2min'"),
    ("nan.check_gradients", "perhaps", "expected true or false"),
    ("enabled", None, "expected true or false"),
    # a job's own options for sbatch
    ("slurm.wait", False, "of the whole sweep, not of one job. Set `hydra.launcher.wait`"),
    ("slurm.n_jobs", 2, "of the whole sweep, not of one job. Set `hydra.launcher.n_jobs`"),
    ("slurm.signal_delay_s", 9, "Set `resilience.signal.warning_s`"),
    ("slurm.timeout", 9, "no such key. Did you mean `resilience.slurm.timeout_min`?"),
    ("slurm", 9, "expected a group of keys"),
    # directories
    ("checkpoint.dir", "", "is empty. Name a directory, or leave the default"),
    ("checkpoint.dir", "  ", "is empty"),
    ("checkpoint.dir", None, "expected a string"),
    ("checkpoint.dir", ["a"], "expected a string"),
    ("checkpoint.dir", "~/saves", "Write the path in full, or as `${oc.env:HOME}/…`"),
    ("checkpoint.dir", "/proc/forge/saves", "/proc cannot be written"),
    # groups and keys
    ("nan", "skip", "expected a group of keys (action,"),
    ("nan", None, "expected a group of keys"),
    ("signal.actions", "stop", "expected a group of keys"),
    ("nan.rollback", 3, "expected a group of keys"),
    ("nan.actoin", "skip", "no such key. Did you mean `resilience.nan.action`?"),
    ("nan.rollback.stepsback", 3, "Did you mean `resilience.nan.rollback.steps_back`?"),
    ("nan.lr_scale", 0.5, "Did you mean `resilience.nan.rollback.lr_scale`?"),
    ("checkpoints.dir", "x", "Did you mean `resilience.checkpoint.dir`?"),
    ("checkpoint.dir.path", "x", "Did you mean `resilience.checkpoint.dir`?"),
    ("every_steps", 3, "Did you mean `resilience.checkpoint.every_steps`?"),
    ("rolback", {}, "no such key"),
    ("xyzzy", 1, "no such key. See conf/resilience/default.yaml"),
    ("checkpoint.dir", "${oc.env:FORGE_NO_SUCH_VARIABLE}", "interpolation does not give a string"),
]


@pytest.mark.parametrize(("key", "value", "said"), SINGLE, ids=[f"{k}={v}" for k, v, _ in SINGLE])
def test_a_broken_rule_names_key_and_value_and_what_to_do(key, value, said):
    """One sentence for one problem: the full key, its value, the rule, and an accepted value."""
    (problem,) = problems(nested(key, value))
    assert f"resilience.{key}" in problem
    if isinstance(value, (str, list)) or value is None:
        assert f"resilience.{key}={value}" in problem
    assert said in problem


@pytest.mark.parametrize(
    ("policy", "anchor"),
    [
        ({"checkpoint": {"every_s": 0}}, "#checkpoint.every_s"),
        ({"nan": {"action": "hlat"}}, "#nan.action"),
        ({"signal": {"actions": {"TERM": "x"}}}, "#signal.actions"),
        ({"slurm": {"no_such": 1}}, "#slurm"),
        ({"checkpoint": {"every_s": 0}, "nan": {"action": "hlat"}}, ""),
        ({"nan": {"acton": "halt"}}, ""),
        ({"shutdown": {"timeout_s": 300}}, ""),
    ],
)
def test_the_error_ends_with_the_place_where_the_key_is_described(policy, anchor):
    """The link is to the whole page if several keys are wrong, or no key has that name."""
    with pytest.raises(ConfigError) as caught:
        load(policy)
    page = "docs/reference/policy.md"
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error).splitlines()[-1] == f"See {page}{anchor}"
    assert not anchor or f'<a id="{anchor[1:]}"></a>' in (ROOT / page).read_text()


def test_the_forced_exit_has_to_be_shorter_than_the_lead():
    """Otherwise Slurm would kill the job before its forced exit could print the stacks."""
    for timeout_s in (60, 61, 1000):
        (problem,) = problems({"signal": {"warning_s": 60}, "shutdown": {"timeout_s": timeout_s}})
        assert f"`resilience.shutdown.timeout_s={timeout_s}`" in problem
        assert "`resilience.signal.warning_s=60`" in problem
        assert "at most 45" in problem
    load({"signal": {"warning_s": 60}, "shutdown": {"timeout_s": 45}})
    load({"signal": {"warning_s": 60}, "shutdown": {"timeout_s": 0}})


@pytest.mark.parametrize("warning_s", [30, 90.0, 600])
def test_a_lead_alone_is_enough(warning_s):
    """Without `shutdown.timeout_s`, the forced exit is derived from `signal.warning_s`."""
    assert load({"signal": {"warning_s": warning_s}}).stop_s == 0.75 * warning_s
    assert load({"signal": {"warning_s": warning_s}, "shutdown": {"timeout_s": 0}}).stop_s == 0


@pytest.mark.parametrize("limit_s", [60.0, 120.0])
def test_the_lead_has_to_be_below_the_time_limit(limit_s):
    """Otherwise Slurm would signal each attempt as soon as it starts."""
    (problem,) = problems({}, time_limit_s=limit_s, limit_key="hydra.launcher.timeout_min=2")
    assert "`resilience.signal.warning_s=120` is not below" in problem
    assert f"{limit_s:g} s (`hydra.launcher.timeout_min=2`)" in problem
    assert f"at most {limit_s / 2:g}" in problem
    load({}, time_limit_s=121.0)


def test_rollback_needs_checkpoints():
    policy = {"nan": {"action": "rollback"}, "checkpoint": {"every_steps": None, "every_s": None}}
    (problem,) = problems(policy)
    assert "`resilience.nan.action=rollback`" in problem
    assert "Set one of them" in problem
    policy["checkpoint"]["every_s"] = 60
    assert load(policy).checkpoint.every_steps is None


def test_a_signal_that_announces_the_time_limit_may_not_be_ignored():
    (problem,) = problems({"signal": {"actions": {"SIGUSR2": "ignore"}}})
    assert "`resilience.signal.name=USR2`" in problem
    assert "`resilience.signal.actions.USR2` is ignore" in problem


def test_all_problems_are_reported_at_once():
    """If only the first were reported, each fix would cost another wait in the queue."""
    policy = {
        "nan": {"actoin": "skip", "max_consecutive": 0},
        "checkpoint": {"every_steps": 0, "dir": "/proc/x", "on_pending_save": "half"},
        "signal": {"name": "KILL", "warning_s": 10, "actions": {"TERM": "die"}},
        "shutdown": {"timeout_s": 20},
        "health": "none",
    }
    found = problems(policy, time_limit_s=5)
    for key in (
        "nan.actoin=skip",
        "nan.max_consecutive=0",
        "checkpoint.every_steps=0",
        "checkpoint.dir=/proc/x",
        "checkpoint.on_pending_save=half",
        "signal.name=KILL",
        "signal.actions.TERM=die",
        "shutdown.timeout_s=20",
        "signal.warning_s=10` is not below",
        "health=none",
    ):
        assert sum(f"`resilience.{key}" in problem for problem in found) == 1, key
    assert len(found) == 10


def test_one_interpolation_that_fails_does_not_hide_the_other_problems():
    found = problems(OmegaConf.create({"checkpoint": {"dir": "${nowhere}"}, "nan": {"actoin": 1}}))
    assert len(found) == 2
    assert "`resilience.checkpoint.dir` cannot be resolved" in found[0]


@pytest.mark.parametrize("policy", [5, "default", [1], True])
def test_a_policy_that_is_no_group_is_told_how_to_choose_a_preset(policy):
    (problem,) = problems(policy)
    assert "`resilience=default`" in problem


def test_a_misused_group_names_a_few_of_its_keys():
    """A list of all keys would hide the sentence before it."""
    for group in ("slurm", "checkpoint", "health"):
        (problem,) = problems({group: 1})
        names, _, _ = problem.partition("expected a group of keys (")[2].partition("), for")
        assert names.count(", ") == 4
        assert re.search(r" and \d+ more$", names)
        (hint,) = hints_for([group])
        assert hint == problem.replace("=1`", "`", 1)


def test_every_group_has_an_example_that_can_be_pasted():
    groups = {key.rsplit(".", n)[0] for key in known_keys() for n in range(1, key.count(".") + 1)}
    for group in groups:
        (problem,) = problems(nested(group, 1))
        assert problem.count(". ") == 0  # one sentence
        example = re.search(r"for example `(\S+)`\.$", problem)[1]
        from_overrides([example])
    (problem,) = problems({"health": {"checks": []}})
    assert problem == (
        "`resilience.health.checks=[]`: expected a group of keys (disk, shm, gpu, ranks), for"
        " example `resilience.health.checks.gpu=refuse`."
    )


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 0.1, "resilience": {"nan": {"action": "halt"}}},
        {"lr": 0.1, "batch": 2, "model": {"depth": 3}, "data": "x", "seed": 1, "steps": 9},
    ],
)
def test_the_whole_config_is_one_problem(config):
    """`forge.Run(cfg)` instead of `forge.Run(cfg.resilience)` is not one error per key."""
    for given in (config, OmegaConf.create(config)):
        (problem,) = problems(given)
        assert "pass only `cfg.resilience`" in problem


def test_a_jobs_own_slurm_options_are_those_that_are_set():
    """With null the launcher's option applies; a value can be a mapping."""
    own = {"timeout_min": 5, "nodes": None, "additional_parameters": {"mail-user": "me"}}
    expected = {"timeout_min": 5, "additional_parameters": {"mail-user": "me"}}
    assert load({"slurm": own}).slurm == expected
    assert load(Policy(slurm=expected)).slurm == expected


# -- directories ----------------------------------------------------------------------------------


def test_a_file_in_the_way_of_the_directory_is_found_also_as_root(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper" / "still"):
        (problem,) = problems({"checkpoint": {"dir": str(path)}})
        assert f"{tmp_path / 'file'} is not a directory. Remove it" in problem


def test_a_link_to_nowhere_is_found(tmp_path):
    """The link's directory is writable, and still no directory of that name can be created."""
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "away")
    assert "is not a directory" in directory_problem(tmp_path / "link" / "saves")


def test_checking_a_directory_leaves_nothing_behind(tmp_path):
    assert directory_problem(tmp_path / "a" / "b") is None
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_directory_is_a_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert directory_problem(tmp_path / "link") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_of_another_user_is_a_problem_and_not_a_traceback(mode, tmp_path):
    """Below a directory without search permission, every stat raises PermissionError."""
    code = (
        "import os; from pathlib import Path; from forge.config.rules import directory_problem;"
        f"os.setuid(65534); print(directory_problem(Path({str(tmp_path)!r}, 'mine', 'deep')))"
    )
    tmp_path.chmod(mode)
    for path in [tmp_path.parent, tmp_path.parent.parent]:
        path.chmod(0o755)
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be written (Permission denied)" in found.stdout, found.stderr


# -- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["USR1", "SIGUSR1", "usr1", "sigusr1"])
def test_a_signal_has_one_meaning_however_it_is_spelled(spelling):
    policy = load({"signal": {"name": spelling, "actions": {spelling: "stop"}}})
    assert policy == load({"signal": {"name": "USR1", "actions": {"USR1": "stop"}}})
    assert policy.signal.name == "USR1"
    assert policy.signal.actions["USR1"] is SignalAction.stop


def test_every_signal_that_may_be_named_exists_here():
    import signal

    assert all(hasattr(signal, f"SIG{name}") for name in SIGNALS)


def test_raise_is_a_synonym_of_halt():
    assert load({"nan": {"action": "raise"}}) == load({"nan": {"action": "halt"}})


def test_every_form_of_a_policy_is_accepted():
    """A Hydra config, a plain dict, nothing, or the dataclass itself."""
    expected = Policy(nan=NanConfig(action=NanAction.halt))
    assert load(None) == Policy()
    assert load({}) == Policy()
    assert load(OmegaConf.create({})) == Policy()
    assert load(OmegaConf.create(None)) == Policy()
    assert load(Policy()) == Policy()
    assert load(expected) == expected
    assert load({"nan": {"action": "halt"}}) == expected
    assert load({"nan": {"action": NanAction.halt}}) == expected
    assert load(OmegaConf.create({"nan": {"action": "halt"}})) == expected
    assert load(OmegaConf.structured(expected)) == expected
    assert load({"nan": OmegaConf.create({"action": "halt"})}) == expected
    assert load(asdict(expected)) == expected


def test_a_group_of_which_nothing_is_set_changes_nothing():
    assert load({"nan": {}, "signal": {"actions": {}}}) == Policy()


def test_a_policy_object_is_checked_like_any_other():
    """A dataclass accepts any value: the text `skip` is not the enum member `skip`."""
    policy = Policy(nan=NanConfig(action="skip"), signal=SignalConfig(name="SIGUSR2"))
    assert load(policy).nan.action is NanAction.skip
    assert load(policy).signal.name == "USR2"
    assert "every_steps=x" in problems(Policy(checkpoint=CheckpointConfig(every_steps="x")))[0]


def test_a_site_names_its_own_checks():
    """A check can have any name; keys that it leaves out have their defaults."""
    given = {"nhc": {"run": ["nhc", "-a"], "action": "exclude_node"}, "mine": {"run": ["true"]}}
    found = load({"health": {"commands": given}}).health.commands
    assert (found["nhc"].run, found["nhc"].timeout_s) == (["nhc", "-a"], 60.0)
    assert found["nhc"].action is CheckAction.exclude_node
    assert found["mine"].action is CheckAction.warn
    (problem,) = problems({"health": {"commands": {"nhc": given["nhc"] | {"action": "exclude"}}}})
    assert CHECK_ACTIONS in problem


def test_loading_leaves_its_argument_alone():
    given = {
        "signal": {"actions": {"sigterm": "save"}},
        "health": {"checks": {"gpu": "warn"}},
    }
    load(given)
    assert given == {
        "signal": {"actions": {"sigterm": "save"}},
        "health": {"checks": {"gpu": "warn"}},
    }
    policy = Policy()
    load(policy).signal.actions["TERM"] = SignalAction.ignore
    assert policy == Policy()


def test_interpolations_are_resolved(monkeypatch):
    """Interpolations can refer to the environment and to other keys of the user's config."""
    monkeypatch.setenv("FORGE_TEST_ACTION", "halt")
    app = OmegaConf.create(
        {
            "interval": 7,
            "resilience": {
                "nan": {"action": "${oc.env:FORGE_TEST_ACTION}"},
                "checkpoint": {"every_steps": "${interval}"},
                "health": {"checks": {"gpu": "${word}"}},
            },
            "word": "warn",
        }
    )
    policy = load(app.resilience)
    assert policy.nan.action is NanAction.halt
    assert policy.checkpoint.every_steps == 7
    assert policy.health.checks["gpu"] is CheckAction.warn
    assert load({"nan": {"action": "${oc.env:FORGE_TEST_ACTION}"}}) == load(
        {"nan": {"action": "halt"}}
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("checkpoint.every_steps", 1e3, 1000),
        ("checkpoint.every_steps", "20", 20),
        ("checkpoint.every_s", 5, 5.0),
        ("checkpoint.every_s", "1e3", 1000.0),
        ("checkpoint.every_s", None, None),
        ("checkpoint.async_save", "yes", True),
        ("checkpoint.dir", 2024, "2024"),
    ],
)
def test_what_plainly_means_the_right_thing_is_taken(key, value, expected):
    policy = load(nested(key, value))
    group, name = key.split(".")
    found = getattr(getattr(policy, group), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("nan.acton", "nan.action"),
        ("nan.maxconsecutive", "nan.max_consecutive"),
        ("nan.rolback.skip_data", "nan.rollback.skip_data"),
        ("rollback", "nan.rollback"),
        ("signal.warning", "signal.warning_s"),
        ("warning_s", "signal.warning_s"),
        ("shutdown.timeout", "shutdown.timeout_s"),
        ("checkpoint.every_step", "checkpoint.every_steps"),
        ("checkpoint.directory", "checkpoint.dir"),
        ("requeue.code_change", "requeue.on_code_change"),
        ("ckpt.keep_last", "checkpoint.keep_last"),
        ("enable", "enabled"),
        ("qqq", None),
        ("requeue.max_requeues", None),  # as similar to max_failures as to max_timeouts
    ],
)
def test_the_nearest_key_is_the_one_that_was_meant(typo, meant):
    assert nearest_key(typo, known_keys()) == meant


def test_a_key_like_several_has_no_guess_but_the_keys_of_its_group():
    """A guess between equally similar keys could name the wrong budget."""
    instead = suggestion("requeue.max_requeues", known_keys())
    assert instead.startswith("`resilience.requeue` has the keys enabled, ")
    assert "max_preemptions, max_timeouts" in instead
    assert suggestion("qqq.rrr", known_keys()) == ""
