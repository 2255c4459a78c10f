"""What main sees of its config is what it sees without forge, at every start: by chance, seeded."""

import copy
import enum
import itertools
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra_apps import VERSION_BASE
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from forge.hydra_app import frozen
from forge.hydra_app.callbacks import JobConfig
from forge.jobdir import identity


class Kind(enum.Enum):
    one = 1
    two = "zwei"


@dataclass
class Part:
    kind: Kind = Kind.one
    rate: float = 1
    path: Path = Path("a b")
    raw: bytes = b"\x00\xff"
    either: int | str = "3"
    unset: int = "???"
    maybe: str | None = None


@dataclass(frozen=True)
class Schema:
    part: Part = field(default_factory=Part)
    parts: list[Part] = field(default_factory=lambda: [Part(kind=Kind.two)])
    by_name: dict[str, Part] = field(default_factory=lambda: {"x": Part(rate=2)})
    none: Part | None = None
    referred: Part = "${typed.part}"
    made: int = "${number:7}"
    word: str = "${number:8}"


TEXTS = [
    *[
        "",
        " ",
        "a: b",
        "# no",
        "- x",
        "'",
        '"',
        "\\",
        "a\\",
        "'a' \"b\"",
        "{a}",
        "[a",
        "%",
        "@x",
        "&a",
    ],
    *["1e3", "1_000", "0x10", "0o7", "007", "12:30:45", "2024-01-02", "on", "No", "y", "~", "null"],
    *[
        "nan",
        ".inf",
        "-",
        "---",
        "...",
        "=",
        "<<",
        "!x",
        "|",
        ">",
        "? a",
        "True",
        "1.",
        "+1",
        "é",
        "😀",
    ],
    *[
        "a\nb",
        "\n",
        "tab\there",
        "\r",
        "\x85",
        "a\u2028b",
        "\u2029",
        "\ufeff",
        "\x00",
        "\x7f",
        "\xa0",
    ],
    *["\ue000", "\ud800", "line \n  more\n", "trailing ", "\u200b"],
]
PLAIN = [
    *TEXTS,
    0,
    -3,
    10**30,
    True,
    False,
    None,
    0.1,
    1e-5,
    1e300,
    -0.0,
    float("inf"),
    float("nan"),
]
PLAIN += [b"\x85\x00", Path("/a/b"), Path("c: d"), Kind.two, "???", [], {}]
REFERRING = [
    *[
        "${a}",
        "x-${a}",
        "${.b}",
        "${..b}",
        "${nested.0}",
        "${nested[1]}",
        "${missing}",
        "${nowhere}",
    ],
    *[
        "\\${a}",
        "lr-\\${a}",
        "\\\\${a}",
        "\\\\\\${a}",
        "\\${number:1}",
        "${number:3}",
        "${number:${a}}",
    ],
    *[
        "${said:'its'}",
        '${said:"\\${a}"}',
        "${said:'${a}'}",
        "x${said:'\\${b}'}\\${c}",
        "${fails:}",
    ],
    *["${oc.env:FUZZED}", "${oc.env:NOT_THERE}", "${oc.env:NOT_THERE,null}", "${oc.select:a,4}"],
    *["${oc.select:nowhere,'???'}", "${oc.decode:'[1, 2]'}", "${oc.dict.keys:typed.part}"],
    *["${oc.dict.values:nested.3}", "${pool:3}", "${pool:40}", "${a}${number:1}", "${tree:}"],
    *["${object:}", "${hydra:job.name}", "${hydra:runtime.output_dir}/ck", "${hydra:run.dir}"],
    *[
        "${hydra:job}",
        "${hydra:runtime.nothing}",
        "${now:%Y}",
        "${tick:}-${hydra:job.name}",
        "${tick:}",
    ],
    *[
        "${said:'a b'}\x85",
        "${said:${nested.0}}",
        "${number:}",
        "${hydra:runtime.output_dir}\\${a}",
    ],
    *["${python_version:}", "${said:???}", "${said:'\\\\'}", "${enumerated:}", "${mapping:}"],
]


def register() -> None:
    count = itertools.count()
    resolvers = {
        "number": lambda *numbers: sum(int(one) for one in numbers),
        "said": lambda text: text,
        "fails": lambda: 1 / 0,
        "pool": lambda index: PLAIN[index],
        "tree": lambda: {"x": [1, {"y": "${a}"}], "z": "\\${a}"},
        "mapping": lambda: {"x": [1, {"y": "\x85"}], "k": Kind.one},
        "object": lambda: object,
        "enumerated": lambda: Kind.two,
        "tick": lambda: f"tick {next(count)}",
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def grown(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth < 3 and kind < 0.2:
        return [grown(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    if depth < 3 and kind < 0.4:
        names: list[Any] = ["a", "b", "on", "1e3", 3, "x y", "ü", "c.d", "12:30:45", True, Kind.one]
        keys = chance.sample(names, chance.randint(0, 4))
        return {key: grown(chance, depth + 1) for key in keys}
    return chance.choice(REFERRING if kind < 0.7 else PLAIN)


def a_tree(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    tree: dict[str, Any] = {f"k{i}": grown(chance) for i in range(25)}
    tree |= {"a": chance.choice([1, "x", 0.5, "${tick:}"]), "b": grown(chance), "missing": "???"}
    tree["nested"] = [grown(chance), chance.choice(PLAIN), 3, {"a": 1, "b": grown(chance)}]
    items = list(tree.items())
    chance.shuffle(items)
    return dict(items)


def seen(node: Any) -> Any:
    """All that reading a config gives: values with their types, errors, the order of keys."""
    if isinstance(node, DictConfig):
        if node._is_none() or node._is_missing():
            return repr(node)
        return {key: read(node, key) for key in node}
    if isinstance(node, ListConfig):
        return [read(node, index) for index in range(len(node))]
    return type(node).__name__, repr(node)


def read(node: Any, key: Any) -> Any:
    if OmegaConf.is_missing(node, key):
        return "missing"
    try:
        value = node[key]
    except Exception as error:  # noqa: BLE001 - main would see it
        return type(error).__name__
    kind = OmegaConf.get_type(value) if isinstance(value, (DictConfig, ListConfig)) else None
    return getattr(kind, "__name__", None), seen(value)


def as_main_sees_it(cfg: DictConfig, directory: Path) -> Any:
    """As Hydra's run_job makes it."""
    with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
        cfg.hydra.runtime.output_dir = str(directory)
    HydraConfig.instance().set_config(cfg)
    task_cfg = copy.deepcopy(cfg)
    with read_write(task_cfg), open_dict(task_cfg):
        del task_cfg["hydra"]
    return seen(task_cfg)


def without_ticks(shown: Any) -> str:
    return re.sub(r"tick \d+", "tick", ascii(shown))


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """A function that makes what Hydra has composed from a tree."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "conf.yaml").write_text("{}\n")
    register()
    with initialize_config_dir(str(folder), **VERSION_BASE):
        base = compose("conf", return_hydra_config=True)
    with read_write(base):  # nobody looks, and each copy takes its time
        for name in ("help", "hydra_help", "hydra_logging", "job_logging", "launcher", "sweeper"):
            base.hydra._get_node(name)._set_value("???")

    def make(tree: dict[str, Any], run_dir: Path) -> DictConfig:
        cfg = copy.deepcopy(base)
        with read_write(cfg), open_dict(cfg):
            cfg.hydra.run.dir = str(run_dir)
            cfg.merge_with(OmegaConf.create(tree))
            cfg.typed = OmegaConf.structured(Schema)
        return cfg

    return make


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 80), marks=[pytest.mark.proofs, pytest.mark.slow])]
)
def test_any_value_is_what_hydra_shows_at_the_first_and_at_every_later_start(
    seeds, composed, tmp_path, monkeypatch
):
    """A text that is resolved twice, or comes back as a number, trains another model."""
    monkeypatch.setenv("FUZZED", "it is \\${a} \x85")
    outer = HydraConfig.instance().cfg
    try:
        for seed in seeds:
            directory = tmp_path / str(seed)
            plain = as_main_sees_it(composed(a_tree(seed), directory), directory)
            first_cfg = composed(a_tree(seed), directory)
            written = identity.as_written(first_cfg)
            JobConfig().on_run_start(first_cfg)
            first = as_main_sees_it(first_cfg, directory)
            assert without_ticks(first) == without_ticks(plain), seed
            frozen.freeze(first_cfg, directory, written)
            # Again as it was, or with files that were edited since.
            later = composed(a_tree(seed + 1000 * (seed % 3 > 0)), directory)
            JobConfig().on_run_start(later)
            assert ascii(as_main_sees_it(later, directory)) == ascii(first), seed
    finally:
        HydraConfig.instance().cfg = outer
