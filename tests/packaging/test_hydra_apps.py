"""A Hydra app that asks for nothing gets nothing: forge installed or not, it is the same."""

import re
import shutil

import pytest
from omegaconf import OmegaConf
from repository import run

pytestmark = pytest.mark.slow

APP = """
import logging
import sys

import hydra

@hydra.main(version_base=None, config_path="conf", config_name="app")
def main(cfg):
    logging.getLogger("app").warning("lr is %s", cfg.lr)
    print(cfg, sorted(m for m in sys.modules if m.partition(".")[0] in ("torch", "submitit")))
    return cfg.lr

main()
"""

CONFIG = """
defaults: [_self_, model: small]
lr: 0.1
resilience: {retries: 2, delay_s: "${lr}"}
"""

COMMANDS = {
    "run": ["lr=0.2", "hydra.run.dir=out"],
    "sweep": ["-m", "lr=0.2,0.3", "model=small,large", "hydra.sweep.dir=out"],
    "config": ["--cfg", "job"],
    "all config": ["--cfg", "all"],
    "help": ["--help"],
    "its own resilience": ["resilience.retries=3", "hydra.run.dir=out"],
}
MISTAKES = {
    "mistyped key": ["lrr=1", "hydra.run.dir=out"],
    "mistyped group": ["mode=small", "hydra.run.dir=out"],
}


FORGES_GROUPS = ["forge/hooks: hydra", "resilience: debug, default, disabled, preemptible, strict"]


def leave_out_time(text: str) -> str:
    return re.sub(r"^\[\d{4}-\d\d-\d\d [\d:,]+\]", "", text, flags=re.MULTILINE)


def observe(environment, folder, arguments, code=0):
    """Everything that an app shows and leaves behind."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "app.py").write_text(APP)
    (folder / "conf" / "app.yaml").write_text(CONFIG)
    (folder / "conf" / "model" / "small.yaml").write_text("width: 4")
    (folder / "conf" / "model" / "large.yaml").write_text("width: 8")
    shown = run([environment.python, "app.py", *arguments], folder, code=code)
    left = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".yaml", ".log"):
            left[str(path.relative_to(folder))] = leave_out_time(path.read_text())
    return leave_out_time(shown), left


def without_sources(left):
    """Hydra's own list of where it looked names forge, and nothing else may."""
    found = {}
    for name, text in left.items():
        if name.endswith(("hydra.yaml", "multirun.yaml")):
            config = OmegaConf.create(text)
            sources = config.hydra.runtime.config_sources
            config.hydra.runtime.config_sources = [s for s in sources if s.provider != "forge"]
            text = OmegaConf.to_yaml(config)
        found[name] = text
    return found


@pytest.mark.parametrize("what", COMMANDS)
def test_an_app_without_resilience_is_the_same_with_forge_installed(
    without_forge, with_wheel, tmp_path, what
):
    """What it prints, its configs, its logs, the folders it makes."""
    shown_without, left_without = observe(without_forge, tmp_path / "app", COMMANDS[what])
    shown_with, left_with = observe(with_wheel, tmp_path / "app", COMMANDS[what])
    if what == "all config":
        both = [
            without_sources({"hydra.yaml": s})["hydra.yaml"] for s in (shown_without, shown_with)
        ]
        shown_without, shown_with = both
    if what == "help":  # lists what can be chosen: forge's groups too
        lines = shown_with.splitlines(keepends=True)
        shown_with = "".join(line for line in lines if line.strip() not in FORGES_GROUPS)
    assert shown_with == shown_without
    assert "torch" not in shown_with
    assert without_sources(left_with) == without_sources(left_without)


@pytest.mark.parametrize("what", MISTAKES)
def test_its_mistakes_are_reported_as_before(without_forge, with_wheel, tmp_path, what):
    """forge's hints are for those who name `resilience`."""
    results = [
        observe(environment, tmp_path / "app", MISTAKES[what], code=1)
        for environment in (without_forge, with_wheel)
    ]
    assert results[0] == results[1]


def test_forge_is_in_one_environment_only(without_forge, with_wheel, tmp_path):
    """Or the tests above compare a thing with itself."""
    code = "import importlib.util as u; print(bool(u.find_spec('forge')))"
    found = [run([one.python, "-c", code], tmp_path) for one in (without_forge, with_wheel)]
    assert found == ["False\n", "True\n"]
