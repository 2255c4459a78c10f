"""The decisions about a job when its config is composed."""

import textwrap
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from sweeps import App

from forge.launch import compose

APP = """
    import hydra
    from pathlib import Path
    from hydra.core.hydra_config import HydraConfig

    WORD = "old"

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        job = HydraConfig.get().job
        print(WORD, cfg.i, job.num, job.id, cfg.where)
        if not Path("is_well").exists():
            raise ValueError("not well")

    if __name__ == "__main__":
        main()
"""
CONF = """
    i: 0
    where: ${hydra:sweep.subdir}
"""


class Color(Enum):
    red = 1


@dataclass
class Inner:
    color: Color = Color.red
    path: Path = Path("a")
    either: int | str = 3
    missing: int = MISSING


@dataclass
class Schema:
    inner: Inner = field(default_factory=Inner)
    nothing: Inner | None = None
    by_color: dict[Color, float] = field(default_factory=lambda: {Color.red: 1.0})
    referred: Inner = "${inner}"
    raw: bytes = b"x"


@pytest.mark.parametrize(
    "cfg",
    [
        OmegaConf.structured(Schema),
        OmegaConf.create({"a": [1, [2.5, None, "???"], {"b": "${x}"}], "x": {1: True}, 2: "y"}),
        OmegaConf.create({"hydra": {"job": 1}, "tree": "${hydra.job}", "a": {"hydra": 2}}),
    ],
)
def test_the_text_of_a_config_is_what_omegaconf_makes_of_it(cfg):
    """By its hash a finished job is known: another text would run all of them again."""
    plain = {}
    for key in (key for key in cfg if key != "hydra"):
        node = cfg._get_node(key)
        is_tree = isinstance(node, (DictConfig, ListConfig))
        plain[str(key)] = OmegaConf.to_container(node) if is_tree else node._value()
    assert repr(compose.plain_of(cfg)) == repr(plain)


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "app", APP, CONF)


def printed(app, number):
    return (app.sweep_dir / str(number) / "output.log").read_text().split("\n")


def test_a_job_that_is_known_keeps_its_number_in_its_config(app):
    """Started again among others it stands elsewhere in the list, and is the same job."""
    assert app.run("i=5").returncode == 1
    (app.folder / "is_well").touch()
    app.finish("i=4,5")
    assert printed(app, 0)[0] == "old 5 0 0 0"
    assert printed(app, 0).count("old 5 0 0 0") == 2
    assert "old 4 1 1 1" in printed(app, 1)


def test_looking_at_a_sweep_leaves_it_as_it_is(app):
    """A finished job without a policy runs again when its code has changed, looked at or not."""
    (app.folder / "is_well").touch()
    (app.folder / "none.conf").touch()  # belongs to no cluster
    app.finish("i=5")
    script = app.folder / "train.py"
    script.write_text(script.read_text().replace('"old"', '"new"'))
    conf = {"SLURM_CONF": str(app.folder / "none.conf")}
    shown = app.run("i=5", "hydra/launcher=slurm", "hydra.launcher.dry_run=true", **conf)
    assert shown.returncode == 0, shown.stdout
    assert "new 5 0 0 0" not in printed(app, 0)
    app.finish("i=5")
    app.finish("i=5")
    assert printed(app, 0).count("new 5 0 0 0") == 1
    # So it does with another config: the old result would hide the new value.
    (app.folder / "conf.yaml").write_text("i: 0\nwhere: elsewhere\n")
    app.finish("i=5")
    assert printed(app, 0).count("new 5 0 0 elsewhere") == 1


def test_a_custom_subdirectory_is_resolved_with_the_number(app):
    (app.folder / "is_well").touch()
    app.finish("i=4,5", "hydra.sweep.subdir='j${hydra.job.num}_${i}'")
    assert "old 5 1 1 j1_5" in printed(app, "j1_5")


def test_a_subdirectory_with_too_long_a_name_is_named_before_anything_starts(app):
    """A job of a sweep with many overrides; on a cluster it failed on its node."""
    long = "x" * 300
    done = app.run("i=4,5", f"+word={long}", "hydra.sweep.subdir=${hydra.job.override_dirname}")
    assert done.returncode == 78, done.stdout
    assert "job 1 (i=5): `hydra.sweep.subdir=+word=xxx" in done.stdout
    assert "has a name of 310 bytes, and the limit for a directory is 255" in done.stdout
    assert not list(app.sweep_dir.glob("*/output.log"))


COUNTED = """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl as Loader

    load = Loader.load_sweep_config

    def counting(*args, **options):
        with open("composed", "a") as file:
            print("composed", file=file)
        return load(*args, **options)

    Loader.load_sweep_config = counting
"""


def test_a_second_start_composes_only_the_jobs_that_are_not_finished(tmp_path):
    """Looking at a sweep of 200 jobs cost half a minute each time."""
    conf = "defaults: [{resilience: default}, _self_]\n" + textwrap.dedent(CONF)
    text = textwrap.dedent(COUNTED) + textwrap.dedent(APP).replace(
        '"is_well"', '"well", str(cfg.i)'
    )
    app = App(tmp_path / "app", text, conf)
    well, composed = app.folder / "well", app.folder / "composed"
    well.mkdir()
    (well / "1").touch()
    options = ["i=1,2", "resilience.requeue.max_failures=0"]
    first = app.run(*options)
    assert first.returncode == 1, first.stdout
    (well / "2").touch()
    composed.unlink()
    app.finish(*options)
    by_hydra = 2  # its sweeper checks each job
    assert len(composed.read_text().splitlines()) == by_hydra + 1
