"""A Hydra app that asks for nothing gets nothing: forge installed or not, it is the same."""

import json
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
    "sweep": ["-m", "model=small,large", "hydra.sweep.dir=out"],
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


RUN = """
import gc, importlib, json, os, pkgutil, runpy, sys
import antlr4.LL1Analyzer, importlib.readers, omegaconf._impl, tempfile
import hydra, hydra._internal.hydra, hydra.core.override_parser.overrides_parser
import hydra._internal.core_plugins, hydra._internal.logging_config

for plugin in pkgutil.iter_modules(hydra._internal.core_plugins.__path__):
    importlib.import_module(f"hydra._internal.core_plugins.{plugin.name}")
gc.freeze()

codes = {}
for name, arguments in json.loads(sys.argv[1]).items():
    os.chdir(name)
    if not os.fork():
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv, sys.path[0] = ["app.py", *arguments], os.getcwd()
        runpy.run_path("app.py", run_name="__main__")
        sys.exit()
    codes[name] = os.waitstatus_to_exitcode(os.wait()[1])
    os.chdir("..")
print(json.dumps(codes))
"""
"""Each command of an app in a process of its own, which are forked from one that has Hydra."""


def observe(environment, folder):
    """Everything that an app shows and leaves behind, by the name of the command."""
    given = COMMANDS | MISTAKES
    for name in given:
        app = folder / name
        (app / "conf" / "model").mkdir(parents=True)
        (app / "app.py").write_text(APP)
        (app / "conf" / "app.yaml").write_text(CONFIG)
        (app / "conf" / "model" / "small.yaml").write_text("width: 4")
        (app / "conf" / "model" / "large.yaml").write_text("width: 8")
    codes = json.loads(run([environment.python, "-c", RUN, json.dumps(given)], folder))
    assert codes == {name: int(name in MISTAKES) for name in given}
    found = {}
    for name in given:
        left = {}
        for path in sorted((folder / name).rglob("*")):
            if path.is_file() and path.suffix in (".yaml", ".log"):
                left[str(path.relative_to(folder))] = leave_out_time(path.read_text())
        found[name] = leave_out_time((folder / name / "output.txt").read_text()), left
    return found


@pytest.fixture(scope="module")
def observed(without_forge, with_wheel, tmp_path_factory):
    """The outputs with and without forge; both run in one folder, since the outputs name it."""
    folder, found = tmp_path_factory.mktemp("apps") / "folder", []
    for environment in (without_forge, with_wheel):
        folder.mkdir()
        found.append(observe(environment, folder))
        shutil.rmtree(folder)
    return found


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
def test_an_app_without_resilience_is_the_same_with_forge_installed(observed, what):
    """What it prints, its configs, its logs, the folders it makes."""
    (shown_without, left_without), (shown_with, left_with) = (one[what] for one in observed)
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
def test_its_mistakes_are_reported_as_before(observed, what):
    """forge's hints are for those who name `resilience`."""
    without, with_forge = (one[what] for one in observed)
    assert with_forge == without
    assert with_forge[0]


def test_forge_is_in_one_environment_only(without_forge, with_wheel, tmp_path):
    """Or the tests above compare a thing with itself."""
    code = "import importlib.util as u; print(bool(u.find_spec('forge')))"
    found = [run([one.python, "-c", code], tmp_path) for one in (without_forge, with_wheel)]
    assert found == ["False\n", "True\n"]
