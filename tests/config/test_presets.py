"""What is declared: the typed policy, the presets in `conf/resilience`, and that they agree."""

import ast
import dataclasses
import inspect
from enum import Enum
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra_apps import VERSION_BASE
from omegaconf import OmegaConf

from forge.config import schema
from forge.config.loading import load
from forge.config.schema import CheckAction, NanAction, Policy, SignalAction, Verify

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
    """It comes with the choice of a preset, and only with that: other apps stay as they are."""
    (tmp_path / "app.yaml").write_text("lr: 0.1\n")
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        chosen = compose("app", [f"+resilience={preset}"], return_hydra_config=True)
        plain = compose("app", [], return_hydra_config=True)
    assert chosen.hydra.callbacks.forge._target_ == "forge.hydra_app.callbacks.JobConfig"
    assert plain.hydra.callbacks == {}
    assert set(plain) == {"lr", "hydra"}


def test_default_yaml_repeats_the_defaults_of_the_dataclasses_leaf_by_leaf(compose_app):
    """Two places with one default each would differ one day, silently."""
    composed = OmegaConf.to_container(compose_app("+resilience=default").resilience)
    declared = plain(dataclasses.asdict(Policy()))
    assert flat(composed) == flat(declared)


def test_presets_only_name_keys_that_the_policy_has():
    """A key that nothing reads looks like a promise."""
    known = set(flat(plain(dataclasses.asdict(Policy()))))
    for preset in PRESETS:
        content = OmegaConf.to_container(OmegaConf.load(CONF / "resilience" / f"{preset}.yaml"))
        content.pop("defaults")
        assert set(flat(content)) <= known


def plain(value):
    """As YAML has it: enums by the name of their member."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def flat(tree, prefix=""):
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = (type(value), value)
    return found


def test_every_field_is_documented_below_itself():
    """The dataclasses are the reference that users read."""
    tree = ast.parse(inspect.getsource(schema))
    undocumented = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.dump(d) for d in node.decorator_list
        ):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                is_doc = (
                    isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                    and isinstance(below.value.value, str)
                )
                if isinstance(field, ast.AnnAssign) and not is_doc:
                    undocumented.append(f"{node.name}.{field.target.id}")
    # A group of keys is documented by its own class.
    groups = {f"{one.__name__}.{f.name}" for one in policy_classes() for f in group_fields(one)}
    assert set(undocumented) <= groups


def group_fields(one):
    defaults = one()
    return [
        f for f in dataclasses.fields(one) if dataclasses.is_dataclass(getattr(defaults, f.name))
    ]


def test_every_documented_field_is_a_field():
    """An unannotated one would vanish silently from the policy."""
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
    words |= {part for key in flat(plain(dataclasses.asdict(Policy()))) for part in key.split(".")}
    words |= set(PRESETS)
    assert not {word.lower() for word in words} & BOOLEAN_WORDS


def test_enum_members_are_named_as_the_word_in_yaml():
    """OmegaConf matches them by name."""
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
    policy, default = load(compose_app("+resilience=preemptible").resilience), Policy()
    assert policy.checkpoint.every_steps < default.checkpoint.every_steps
    assert policy.checkpoint.every_s < default.checkpoint.every_s
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
