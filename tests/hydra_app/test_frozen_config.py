"""The stored config of a job: what is damaged, or is another job's, ends the start with 78."""

import json
import os
import sys
from pathlib import Path

import pytest
from hydra_apps import App
from omegaconf import OmegaConf

from forge import messages
from forge.errors import DamagedConfig, ExitCode
from forge.hydra_app import callbacks, frozen
from forge.jobdir import identity

SEES = """
import json, os
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("number", lambda *numbers: sum(map(int, numbers)))

@hydra.main(version_base=None, config_path=".", config_name="sees")
def main(cfg):
    found = {}
    for key in cfg:
        if key != "resilience":
            try:
                found[key] = repr(cfg[key])
            except Exception as error:
                found[key] = type(error).__name__
    with open(os.path.join(HydraConfig.get().runtime.output_dir, "seen.jsonl"), "a") as file:
        file.write(json.dumps(found) + "\\n")

main()
"""
SEEN = r"""
defaults: [resilience: default, _self_]
lr: 0.1
escaped: 'lr-\${lr}'
twice: 'lr-\\${lr}'
resolved: '\${lr}-${number:1,2}'
words: ["1e3", "on", "0x10", "12:30:45", "\N", "\L x", ~, 1e3, 12:30:45]
name: ${escaped}
missing: ???
nowhere: ${nowhere_else}
place: ${hydra:runtime.output_dir}/ck
job: ${hydra:job.name}
"""


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "app")


def seen(job: Path) -> list[dict]:
    return [json.loads(line) for line in (job / "seen.jsonl").read_text().splitlines()]


def test_main_sees_what_it_sees_without_forge(app):
    """In a single job, in a resumed job, and in a job of a sweep."""
    (app.folder / "sees.py").write_text(SEES)
    for name in ("sees", "plain"):
        (app.folder / f"{name}.yaml").write_text(SEEN)
    edited = SEEN.replace("lr: 0.1", "lr: 0.2")
    plain = app.python("sees.py", "~resilience", "hydra.run.dir=plain")
    assert plain.returncode == 0, plain.stdout
    assert app.python("sees.py", "hydra.run.dir=job").returncode == 0
    swept = app.python("sees.py", "-m", "hydra/launcher=local", "hydra.sweep.dir=sweep")
    assert swept.returncode == 0, swept.stdout
    (app.folder / "sees.yaml").write_text(edited)
    for directory in ("job", "sweep/0"):
        again = app.python("sees.py", f"hydra.run.dir={directory}")
        assert again.returncode == 0, again.stdout
    (expected,) = seen(app.folder / "plain")
    assert expected["escaped"] == repr("lr-${lr}")
    for directory in ("job", "sweep/0"):
        place = {"place": repr(str(app.folder / directory / "ck"))}
        assert seen(app.folder / directory) == 2 * [expected | place]


def test_a_damaged_config_is_never_trained_with(app):
    """Hydra would only print a warning, and train with the damaged config."""
    job = app.folder / "job"
    assert app.run("hydra.run.dir=job", "signal_in=3").returncode == 143
    for name, old, new in (
        ("config.yaml", b"lr: 0.1", b"lr: 0.3"),
        ("start.yaml", b"signal_in=3", b"signal_in=2"),
    ):
        path = job / ".forge" / name
        whole = path.read_bytes()
        path.write_bytes(whole.replace(old, new))
        assert path.read_bytes() != whole
        refused = app.run("hydra.run.dir=job")
        assert refused.returncode == ExitCode.BAD_CONFIG, refused.stdout
        assert f"{path} is damaged" in refused.stdout
        assert "Traceback" not in refused.stdout
        path.write_bytes(whole)
    assert len(app.seen("job")) == 1


def test_any_damage_is_noticed(tmp_path):
    """Zeros after a power cut, half a file, a flipped bit, wherever it is."""
    from forge.jobdir import config_file

    path = tmp_path / "config.yaml"
    config_file.write(path, {"lr": 0.1, "deep": ["\x85", None, Path("x")]})
    whole = path.read_bytes()
    assert config_file.read(path) == {"lr": 0.1, "deep": ["\x85", None, Path("x")]}
    cut = [whole[:length] for length in range(0, len(whole), 7)]
    flipped = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 3)
    ]
    for damaged in (*cut, *flipped, bytes(len(whole)), whole + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(DamagedConfig, match="is damaged"):
            config_file.read(path)


def test_whatever_a_callback_raises_ends_the_job(monkeypatch):
    """Otherwise Hydra would train with a config that forge has neither checked nor stored."""
    said = []
    monkeypatch.setattr(messages, "say", lambda text, level=0: said.append(text))
    hooks = [
        (kind(), name)
        for kind in (callbacks.JobConfig, callbacks.NotHere)
        for name in vars(kind)
        if name.startswith("on_")
    ]
    monkeypatch.setenv("FORGE_REHEARSAL", "anywhere")
    is_refusing = lambda: sys._getframe(2).f_code.co_name == "_refuse"  # noqa: E731
    for hook, name in hooks:
        monkeypatch.setattr(
            callbacks.hints, "composition_succeeded", lambda: is_refusing() or 1 / 0
        )
        with pytest.raises(SystemExit) as ended:
            getattr(hook, name)(config=None)
        assert ended.value.code == ExitCode.BAD_CONFIG
    assert sum("ZeroDivisionError" in text for text in said) == 3, said


def test_ranks_that_ask_for_a_change_at_once_keep_each_other_s_files(tmp_path, monkeypatch):
    """Each rank stores the new config; a rank that finds its folder removed would exit with 78."""
    hydra = {"job": {"name": "train", "config_name": "train"}, "overrides": {"task": []}}
    cfg = OmegaConf.create({"lr": 0.4, "resilience": {"resume": "changed"}, "hydra": hydra})
    replace = os.replace

    def after_another_rank(*names, **folders):
        monkeypatch.setattr(os, "replace", replace)
        frozen.freeze(cfg, tmp_path, {"lr": 0.4})
        replace(*names, **folders)

    frozen.freeze(cfg, tmp_path, {"lr": 0.1})
    monkeypatch.setattr(os, "replace", after_another_rank)
    frozen.freeze(cfg, tmp_path, {"lr": 0.4})
    assert identity.current(tmp_path, "").config == {"lr": 0.4}


def test_two_programs_do_not_share_a_directory(app):
    """Otherwise the second program would evaluate with the training config of the first."""
    text = (app.folder / "train.py").read_text()
    (app.folder / "other.py").write_text(text)
    assert app.run("hydra.run.dir=job", "signal_in=3").returncode == 143
    other = app.python("other.py", "hydra.run.dir=job")
    assert other.returncode == ExitCode.BAD_CONFIG, other.stdout
    assert "was started by train with config train, but this command starts other" in other.stdout
    assert app.run("hydra.run.dir=job").returncode == 0


def test_an_override_that_is_computed_is_repeated_in_the_command(app):
    """Regression test: forge refused its own resume command after an override was resolved.

    Resolved, a value may read as a sweep.
    """
    config = app.folder / "train.yaml"
    config.write_text(config.read_text() + 'other: "x, y"\n')
    typed = [
        "+data=${oc.env:HOME}/x",
        "+at=${now:%S-%f}",
        "+tag='\\${lr}'",
        "+deep={a: ${lr}}",
        "name=${other}",
    ]
    stopped = app.run("hydra.run.dir=job", "signal_in=3", *typed)
    assert stopped.returncode == 143, stopped.stdout
    resumed = app.resume(stopped.stdout, in_shell=True)
    assert resumed.returncode == 0, resumed.stdout
    assert len(set(app.seen("job"))) == 1
    assert f"{os.environ['HOME']}/x" in (app.folder / "job/.forge/config.yaml").read_text()
