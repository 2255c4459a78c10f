"""The policy on a true command line: presets, sweeps, and hints where Hydra refuses a key."""

from pathlib import Path

import forked
import pytest

from forge.hydra_app import hints

APP = """
import hydra, torch, forge

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    model = torch.nn.Linear(2, 1)
    with forge.Run(cfg.resilience, model=model) as run:
        for step in run.steps(2):
            pass
    print("action", run.policy.nan.action.name, "step", run.step, "enabled", run.policy.enabled)

main()
"""

PLAIN_APP = """
import hydra

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    print("config", dict(cfg))
    if cfg.get("fails"):
        raise ValueError("the app's own error")

main()
"""


def make_app(directory: Path, code: str, config: str) -> Path:
    (directory / "conf").mkdir()
    (directory / "app.py").write_text(code)
    (directory / "conf" / "train.yaml").write_text(config)
    return directory


def run(directory: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and all output, in the order in which it came."""
    found = forked.completed(["app.py", *arguments], directory)
    return found.returncode, found.stdout


@pytest.fixture
def app(tmp_path):
    """An app with the default preset, that trains two steps."""
    return make_app(tmp_path, APP, "defaults: [resilience: default, _self_]\n")


@pytest.fixture
def light_app(tmp_path):
    """An app with the default preset that does not import torch."""
    return make_app(tmp_path, PLAIN_APP, "defaults: [resilience: default, _self_]\n")


@pytest.fixture
def bare_app(tmp_path):
    """An app that never heard of forge."""
    return make_app(tmp_path, PLAIN_APP, "lr: 0.1\n")


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("debug", "action halt step 2 enabled True"),
        ("disabled", "action skip step 2 enabled False"),
    ],
)
def test_a_preset_is_chosen_by_its_name(app, preset, expected):
    """The whole way: command line, Hydra, policy, run."""
    code, output = run(app, f"resilience={preset}", "hydra.run.dir=out")
    assert (code, expected in output) == (0, True), output
    assert (app / "out" / "checkpoints").exists() == (preset != "disabled")
    assert (app / "out" / ".forge").exists() == (preset != "disabled")


def test_a_policy_value_can_be_swept(app):
    code, output = run(app, "-m", "resilience.nan.action=skip,halt", "hydra.sweep.dir=sweep")
    assert code == 0, output
    assert output.index("action skip step 2") < output.index("action halt step 2")
    assert (app / "sweep" / "0" / "checkpoints" / "step_2").is_dir()
    assert (app / "sweep" / "1" / "checkpoints" / "step_2").is_dir()


def test_a_bad_value_in_a_sweep_ends_with_78(light_app):
    code, output = run(light_app, "-m", "resilience.nan.action=skip,hlat")
    assert code == 78, output
    assert "`resilience.nan.action=hlat`: expected warn | skip" in output


def test_a_bad_policy_ends_with_78_before_the_users_main(light_app):
    """A wrong config must be reported before the model is built, which can take minutes."""
    code, output = run(light_app, "resilience.nan=skip", "resilience.checkpoint.every_s=0")
    assert code == 78
    assert "2 problems" in output
    assert "config {" not in output
    assert "Traceback" not in output


def test_yamls_off_is_named_a_boolean(light_app):
    """YAML files read `off` as a boolean, but users mean the word."""
    (light_app / "conf" / "train.yaml").write_text(
        "defaults: [resilience: default, _self_]\nresilience: {nan: {action: off}}\n"
    )
    code, output = run(light_app)
    assert code == 78
    assert "`resilience.nan.action=False`" in output
    assert "found a boolean" in output


def test_a_mistyped_key_is_followed_by_the_key_that_was_meant(light_app):
    code, output = run(light_app, "resilience.nan.actoin=skip")
    assert code == 1
    hydra, hint = output.index("Key 'actoin' is not in struct"), output.index("forge: ")
    assert hydra < hint, "Hydra's own message comes first"
    assert "Did you mean `resilience.nan.action`?" in output[hint:]


def test_a_mistyped_key_in_a_sweep_gets_the_hint_too(light_app):
    code, output = run(light_app, "-m", "resilience.nan.actoin=skip,halt")
    assert code == 1
    assert "Did you mean `resilience.nan.action`?" in output


def test_a_signal_in_other_words_is_said_how_to_write(light_app):
    _, output = run(light_app, "resilience.signal.actions.SIGHUP=save")
    assert "write `resilience.signal.actions.HUP=…`" in output
    code, output = run(light_app, "resilience.signal.actions.HUP=save")
    assert (code, "'HUP': 'save'" in output) == (0, True), output


def test_an_app_without_a_policy_is_told_how_to_add_one(bare_app):
    """Hydra's "Key 'resilience' is not in struct" does not tell users to add a preset."""
    code, output = run(bare_app, "resilience.nan.action=skip")
    assert code == 1
    assert output.index("Key 'resilience' is not in struct") < output.index("forge: ")
    assert "`defaults: [resilience: default, _self_]`" in output
    assert "`+resilience=default`" in output
    code, output = run(bare_app, "+resilience=default", "resilience.nan.action=halt")
    assert (code, "'action': 'halt'" in output) == (0, True), output


def test_a_job_whose_main_reads_a_missing_policy_is_told_how_to_add_one(tmp_path):
    """OmegaConf's error in the user's code does not mention forge's presets."""
    app = make_app(tmp_path, APP, "lr: 1\n")
    code, output = run(app, "-m", "hydra/launcher=local", "hydra.sweep.dir=out", "lr=1")
    assert code == 1
    assert "job 0: failed: ConfigAttributeError: Key 'resilience' is not in struct." in output
    log = (app / "out" / "0" / "output.log").read_text()
    for text in (output, log):
        assert "The config has no policy: add a preset to its defaults list (`defaults:" in text


def test_an_app_with_a_resilience_key_of_its_own_is_left_alone(tmp_path):
    """Installing forge changes no other app: not its config, its output, nor its errors."""
    app = make_app(tmp_path, PLAIN_APP, "resilience: {retries: 3}\nfails: false\n")
    code, output = run(app, "resilience.retries=4", "hydra.run.dir=out")
    assert (code, output) == (0, "config {'resilience': {'retries': 4}, 'fails': False}\n")
    assert not (app / "out" / ".forge").exists()
    code, output = run(app, "resilience.retries=4", "fails=true")
    assert code == 1
    assert "the app's own error" in output
    assert "forge" not in output
    code, output = run(app, "resilience.retires=4")
    assert code == 1
    assert "Key 'retires' is not in struct" in output
    assert "forge" not in output


def test_an_app_that_uses_the_word_in_a_value_gets_no_hint(bare_app):
    code, output = run(bare_app, "lr=resilience.nan.action=skip", "+x=1", "nosuch=1")
    assert code == 1
    assert "forge" not in output


# -- the hints themselves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["nan.actoin"], ["not a key of forge's policy. Did you mean `resilience.nan.action`?"]),
        (["nan.actoin", "nan.action"], ["Did you mean `resilience.nan.action`?"]),
        (
            ["nan.actoin", "signal.warning"],
            ["`resilience.nan.action`", "`resilience.signal.warning_s`"],
        ),
        (["signal.actions.SIGTERM"], ["write `resilience.signal.actions.TERM=…`"]),
        (["signal.actions.sighup"], ["write `resilience.signal.actions.HUP=…`"]),
        (["nan.action"], ["add a preset to its defaults list"]),
        (["qqq"], []),
    ],
)
def test_a_hint_says_what_to_write(keys, expected):
    found = hints.hints_for(keys)
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence


@pytest.mark.parametrize(("argument", "number"), [("lrr=1", 1), ("+resilience=default", 0)])
def test_no_hint_about_presets_if_the_command_adds_one(argument, number, monkeypatch):
    """Hydra refused another key: the hint would send people the wrong way."""
    monkeypatch.setattr(hints, "pending_keys", [])
    monkeypatch.setattr(hints.atexit, "register", lambda function: None)
    hints.arm(["resilience.nan.action=halt", argument])
    assert len(hints.hints_for(["nan.action"])) == number


@pytest.mark.parametrize(
    "argument",
    ["resilience.nan.actoin=skip", "+resilience.nan.actoin=1", "++resilience.nan.actoin=1"],
)
def test_every_form_of_an_override_arms_a_hint(argument, monkeypatch):
    registered = []
    monkeypatch.setattr(hints, "pending_keys", [])
    monkeypatch.setattr(hints.atexit, "register", registered.append)
    hints.arm([argument])
    hints.arm([argument])
    assert hints.pending_keys == ["nan.actoin"]
    assert len(registered) == 1
    hints.composition_succeeded()
    assert hints.pending_keys == []


@pytest.mark.parametrize(
    "argument", ["lr=1", "resilience=debug", "x.resilience.nan=1", "--resilience.x"]
)
def test_other_arguments_arm_none(argument, monkeypatch):
    registered = []
    monkeypatch.setattr(hints, "pending_keys", [])
    monkeypatch.setattr(hints.atexit, "register", registered.append)
    hints.arm([argument])
    assert (hints.pending_keys, registered) == ([], [])
