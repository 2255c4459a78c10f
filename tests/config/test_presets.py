"""The typed policy and the presets in `conf/resilience` agree with each other."""

import dataclasses
import inspect
from enum import Enum
from pathlib import Path

import policy_pages
import pytest
import size
from hydra import compose, initialize_config_dir
from hydra_apps import VERSION_BASE
from omegaconf import OmegaConf

from forge.config import keys, schema, unknown
from forge.config.conversion import known_keys
from forge.config.loading import load
from forge.config.schema import CheckAction, NanAction, Policy, SignalAction, Verify
from forge.launch.slurm.slurm_options import SlurmOptions

CONF = Path(schema.__file__).parents[2] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "resilience").glob("*.yaml"))
BOOLEAN_WORDS = {"on", "off", "yes", "no", "y", "n", "true", "false"}


@pytest.fixture
def compose_app(tmp_path):
    """Compose a Hydra app of one line, with overrides."""
    (tmp_path / "app.yaml").write_text("defaults: [_self_]\nlr: 0.1\n")

    def composed(*overrides):
        with initialize_config_dir(str(tmp_path), **VERSION_BASE):
            return compose("app", list(overrides))

    return composed


def policy_classes() -> list[type]:
    return [
        one
        for one in vars(schema).values()
        if dataclasses.is_dataclass(one) and one.__module__ == schema.__name__
    ]


def test_the_presets_that_users_were_promised_exist():
    assert {"default", "preemptible", "debug", "disabled"} <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_is_a_good_policy(compose_app, preset):
    """A preset that does not load would be found by the first user who chooses it."""
    composed = compose_app(f"+resilience={preset}")
    policy = load(composed.resilience)
    assert isinstance(policy, Policy)
    assert composed.lr == 0.1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_brings_the_callback_that_keeps_a_jobs_config(tmp_path, preset):
    """Only an app that chooses a preset gets the callback; other apps stay as they are."""
    (tmp_path / "app.yaml").write_text("lr: 0.1\n")
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        chosen = compose("app", [f"+resilience={preset}"], return_hydra_config=True)
        plain = compose("app", [], return_hydra_config=True)
    assert chosen.hydra.callbacks.forge._target_ == "forge.hydra_app.callbacks.JobConfig"
    assert plain.hydra.callbacks == {}
    assert set(plain) == {"lr", "hydra"}


@pytest.mark.parametrize(
    ("path", "made"),
    [(policy_pages.PRESET, policy_pages.preset), (policy_pages.PAGE, policy_pages.page)],
)
def test_what_is_generated_from_the_schema_is_up_to_date(path, made):
    """People read the defaults and bounds in the generated files, and change the schema."""
    assert path.read_text() == made(), f"{path} is not up to date: run `make policy`"


def test_the_default_preset_is_the_default_policy(compose_app):
    """The defaults are the same with and without Hydra."""
    assert load(compose_app("+resilience=default").resilience) == Policy()


def test_a_policy_fits_on_a_page():
    """A mapping counts as one key. Each new key makes the page harder to read."""
    found = [row.key for row in policy_pages.rows()]
    assert len(found) <= 50
    assert size.num_keys(Path(schema.__file__).read_text()) == len(found)
    assert len(policy_pages.FIRST) == 10
    assert set(policy_pages.FIRST) <= set(found)


def test_a_jobs_own_options_are_those_of_the_launcher():
    """Each option of the launchers is either set for each job, or for the whole sweep."""
    theirs = [one.name for one in dataclasses.fields(SlurmOptions) if one.name != "_target_"]
    assert {*schema.SLURM_KEYS, *unknown.OF_THE_SWEEP} == {*theirs, "n_jobs"}
    assert list(schema.SLURM_KEYS) == [one for one in theirs if one in schema.SLURM_KEYS]


def test_presets_only_name_keys_that_the_policy_has():
    """A key that nothing reads looks like a promise."""
    known = set(known_keys())
    for preset in PRESETS:
        content = OmegaConf.to_container(OmegaConf.load(CONF / "resilience" / f"{preset}.yaml"))
        content.pop("defaults")
        assert set(flat(content)) <= known


def flat(tree, prefix=""):
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = (type(value), value)
    return found


def test_every_key_says_what_it_means():
    """Each key has a docstring of whole sentences; a group of keys has that of its class."""
    for one in policy_classes():
        assert inspect.getdoc(one)
        for name, _, known in keys.walk(one()):
            assert known.help.endswith("."), name
        groups = {f.name for f in dataclasses.fields(one)}
        groups -= {name.partition(".")[0] for name, _, _ in keys.walk(one())}
        assert not groups


def test_every_documented_field_is_a_field():
    """A field without an annotation would vanish silently from the policy."""
    for one in policy_classes():
        names = {f.name for f in dataclasses.fields(one)}
        names |= {name for name, value in vars(one).items() if isinstance(value, property)}
        public = {name for name in vars(one) if not name.startswith("_")}
        assert public <= names


def test_no_name_and_no_value_is_a_word_that_yaml_reads_as_a_boolean():
    """`action: off` would arrive as False."""
    enums = [
        one
        for one in vars(schema).values()
        if isinstance(one, type) and issubclass(one, Enum) and one is not Enum
    ]
    assert len(enums) >= 5
    words = {member for one in enums for member in one.__members__}
    words |= {part for key in known_keys() for part in key.split(".")}
    words |= set(PRESETS)
    assert not {word.lower() for word in words} & BOOLEAN_WORDS


def test_enum_members_are_named_as_the_word_in_yaml():
    """OmegaConf matches enum members by name."""
    for one in (NanAction, SignalAction, CheckAction, Verify):
        for name, member in one.__members__.items():
            assert member.value == name or (name, member.value) == ("raise", "halt")


def test_the_debug_preset_starts_once_halts_at_the_first_nan_and_refuses_changed_code(compose_app):
    policy = load(compose_app("+resilience=debug").resilience)
    assert not policy.requeue.enabled
    assert policy.nan.action is NanAction.halt
    assert policy.requeue.on_code_change.name == "refuse"


def test_the_preemptible_preset_saves_more_often_than_the_default(compose_app):
    """A preemption costs what was trained since the last save."""
    policy = load(compose_app("+resilience=preemptible").resilience)
    assert policy.checkpoint.every_steps == 200  # the default has none
    assert policy.checkpoint.every_s < Policy().checkpoint.every_s
    assert policy.checkpoint.async_save
    # Slurm's GraceTime is often 30 s: the forced exit has to come before the kill.
    assert policy.shutdown.timeout_s <= 30


def test_the_disabled_preset_switches_everything_off(compose_app):
    assert not load(compose_app("+resilience=disabled").resilience).enabled


def test_a_preset_and_a_value_combine_on_the_command_line(compose_app):
    composed = compose_app("+resilience=preemptible", "resilience.nan.action=rollback")
    policy = load(composed.resilience)
    assert policy.nan.action is NanAction.rollback
    assert policy.checkpoint.every_steps == 200


def test_the_action_of_one_signal_is_set_by_itself(compose_app):
    composed = compose_app("+resilience=default", "resilience.signal.actions.HUP=save")
    assert load(composed.resilience).signal.actions["HUP"] is SignalAction.save
