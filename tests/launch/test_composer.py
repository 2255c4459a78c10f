"""Configs that are copies of a few composed ones are the same as if Hydra had composed each."""

import random
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf
from rows import few

from forge.launch.composer import Composer, is_same

FILES = {
    "conf": """
        defaults:
          [{typed: schema}, {model: small}, {optional extra: null}, {resilience: default}, _self_]
        lr: 0.1
        seed: 3
        name: run
        missing: ???
        nothing: null
        layers: [1, 2]
        tree: {a: 1, b: {c: x, d: "${lr}"}, e: "${oc.env:HOME}"}
        refers: ${tree}
        when: ${now:%f}
        twice: ${hydra:job.num}
    """,
    "model/small": "size: 1\nact: relu\ninner: {depth: 2}\n",
    "model/large": "# @package _global_\nmodel: {size: 100, lr: '${lr}'}\nseed: 5\n",
    "model/nested": "defaults: [/extra@inner: more, _self_]\nsize: 7\n",
    "extra/more": "depth: 4\nwords: [a, b]\n",
}
HYDRA = [
    "",
    "job: {name: '${name}'}",
    "job: {name: '${missing}'}",
    "job: {env_copy: [HOME, PATH]}",
    "job: {env_set: {A: '${lr}'}}",
    "job: {config: {override_dirname: {kv_sep: ':', item_sep: '/', exclude_keys: [seed]}}}",
    "job: {config: {override_dirname: {kv_sep: '${name}', exclude_keys: ['${name}', lr]}}}",
    "sweep: {subdir: '${hydra:job.override_dirname}'}",
]
"""Settings of Hydra in the primary config, some of which depend on values of the jobs."""
VALUES = [
    "1",
    "-2.5",
    "1e-3",
    "true",
    "null",
    "word",
    "'a b=c'",
    "[1,x]",
    "{a:2}",
    "${seed}",
    "???",
]
KEYS = [
    "lr",
    "seed",
    "name",
    "missing",
    "nothing",
    "layers",
    "tree.a",
    "tree.b.c",
    "tree",
    "refers.a",
]
KEYS += [
    "typed.rate",
    "typed.color",
    "typed.path",
    "typed.either",
    "resilience.checkpoint.every_steps",
]
CHOICES = [
    "model=small",
    "model=large",
    "model=nested",
    "+extra@other=more",
    "extra=more",
    "~model",
]
ODD = [
    "+new={}",
    "++lr={}",
    "+tree.b.new={}",
    "+tree={}",
    "hydra.job.name={}",
    "~lr",
    "++also.new={}",
]


class Color(Enum):
    red = 1
    blue = 2


@dataclass
class Typed:
    rate: float = 0.5
    color: Color = Color.red
    path: Path = Path("a")
    either: int | str = 3
    needed: int = MISSING
    rates: list[float] = field(default_factory=lambda: [0.1])


class Counted:
    """Hydra's config loader, and how often it composed a config."""

    def __init__(self, loader):
        self._loader = loader
        self.num_composed = 0

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def load_sweep_config(self, *args, **kwargs):
        self.num_composed += 1
        return self._loader.load_sweep_config(*args, **kwargs)


@pytest.fixture
def sweep(tmp_path):
    """Composes a sweep's config as Hydra does: (the loader, the config)."""
    ConfigStore.instance().store(group="typed", name="schema", node=Typed)

    def make(hydra="", *overrides, **files):
        for name, text in (FILES | files).items():
            path = tmp_path / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            lines = [line.removeprefix(" " * 8) for line in text.split("\n")]
            path.write_text("\n".join(lines))
        if hydra:
            with (tmp_path / "conf.yaml").open("a") as file:
                file.write(f"\nhydra: {{{hydra}}}\n")
        presets = f"hydra.searchpath=[file://{Path(__file__).parents[2] / 'conf'}]"
        loader = Counted(GlobalHydra.instance().config_loader())
        return loader, loader.load_configuration("conf", [presets, *overrides], RunMode.MULTIRUN)

    with initialize_config_dir(str(tmp_path), version_base=None):
        yield make


def outcome(compose, overrides):
    """A composed config, or Hydra's refusal as a text."""
    try:
        return compose(overrides)
    except HydraException as error:
        return f"{type(error).__name__}: {error}"


def compare(loader, config, batch):
    """Assert that each job's config is what Hydra composes for it."""
    composer = Composer(loader, config, batch)
    for overrides in batch:
        mine = outcome(composer.compose, overrides)
        theirs = outcome(lambda one: loader.load_sweep_config(config, one), overrides)
        assert type(mine) is type(theirs), (overrides, mine, theirs)
        if isinstance(theirs, str):
            assert mine == theirs
        else:
            assert repr(OmegaConf.to_container(mine)) == repr(OmegaConf.to_container(theirs))
            assert is_same(mine, theirs), overrides


def drawn_batch(draw):
    """Jobs of a sweep: the same keys with other values, and sometimes jobs of other kinds."""
    keys = draw.sample(KEYS, draw.randint(1, 4))
    choices = draw.sample(CHOICES, draw.randint(0, 2))
    odd = draw.sample(ODD, draw.choice([0, 0, 1, 2]))
    batch = []
    for _ in range(draw.randint(5, 9)):
        values = [f"{key}={draw.choice(VALUES)}" for key in keys]
        own = [one.format(draw.choice(VALUES)) for one in odd]
        job = [*values, *choices, *own]
        draw.shuffle(job)
        batch.append(job)
    return batch


@pytest.mark.parametrize("seed", few(1, range(8)))
def test_each_config_is_what_hydra_composes(sweep, seed):
    """A job must not train with anything but the config that its overrides describe."""
    draw = random.Random(seed)
    loader, config = sweep(HYDRA[seed % len(HYDRA)], *draw.choice([[], ["hydra.verbose=true"]]))
    compare(loader, config, drawn_batch(draw))


@pytest.mark.parametrize("choices", [[], ["model=large"]])
def test_hydra_composes_only_a_few(sweep, choices):
    """200 jobs cost 27 s of CPU time before they were submitted."""
    loader, config = sweep()
    batch = [[f"lr={n}", *choices, f"+new={n}"] for n in range(50)]
    composer = Composer(loader, config, batch)
    found = [composer.compose(one) for one in batch]
    assert loader.num_composed == 3
    assert [one.lr for one in found] == [one.new for one in found] == list(range(50))
    assert [one.hydra.overrides.task for one in found] == batch


def test_each_choice_of_groups_is_a_family_of_its_own(sweep):
    """A sweep over models and seeds."""
    loader, config = sweep()
    batch = [[f"model={m}", f"seed={n}"] for m in ("small", "nested") for n in range(20)]
    composer = Composer(loader, config, batch)
    assert [composer.compose(one).model.size for one in batch] == [1] * 20 + [7] * 20
    assert loader.num_composed == 6


@pytest.mark.parametrize(
    "override", ["~tree.a", "hydra.job.name=x", "seed=3,4", "hydra.sweep.subdir=${seed}"]
)
def test_hydra_composes_jobs_with_other_overrides(sweep, override):
    """What is not the assignment of a value can change what is read, and in which order."""
    loader, config = sweep()
    batch = [[f"lr={n}", override] for n in range(6)]
    composer = Composer(loader, config, batch)
    for one in batch:
        outcome(composer.compose, one)
    assert loader.num_composed == 6


def test_if_a_copy_would_differ_hydra_composes_the_whole_family(sweep, monkeypatch):
    """A version of Hydra can do more than assign a value."""
    loader, config = sweep()
    load = Counted.load_sweep_config

    def load_more(self, config, overrides):
        found = load(self, config, overrides)
        found.name = str(found.lr)
        return found

    monkeypatch.setattr(Counted, "load_sweep_config", load_more)
    batch = [[f"lr={n}"] for n in range(8)]
    composer = Composer(loader, config, batch)
    assert [composer.compose(one).name for one in batch] == [str(n) for n in range(8)]
    assert loader.num_composed > 8


def test_the_refusal_of_a_job_names_this_job(sweep):
    """A job in the middle of the batch is composed first, to compare it with its copy."""
    loader, config = sweep()
    batch = [["typed.rate=1"], *([f"typed.rate=word{n}"] for n in range(8))]
    composer = Composer(loader, config, batch)
    assert composer.compose(batch[0]).typed.rate == 1
    with pytest.raises(HydraException, match="word0"):
        composer.compose(batch[1])


def test_a_config_with_a_class_that_cannot_be_pickled_is_composed(sweep):
    """A schema that is defined in a function."""

    @dataclass
    class Local:
        size: int = 1

    ConfigStore.instance().store(group="model", name="local", node=Local)
    loader, config = sweep()
    batch = [["model=local", f"model.size={n}"] for n in range(6)]
    composer = Composer(loader, config, batch)
    assert [composer.compose(one).model.size for one in batch] == list(range(6))


def test_jobs_with_the_same_overrides_do_not_share_a_config(sweep):
    """A sweeper that draws at random repeats itself, and each config gets a number of its own."""
    loader, config = sweep()
    batch = [["lr=1"]] * 6
    composer = Composer(loader, config, batch)
    assert len({id(composer.compose(one)) for one in batch}) == 6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": "${b}", "b": 1}, {"a": 1, "b": 1}),
        ({"a": None}, {"a": {}}),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}),
    ],
)
def test_configs_that_differ_are_told_apart(one, other):
    """The comparison has to notice what a job could notice."""
    assert is_same(OmegaConf.create(one), OmegaConf.create(one))
    assert not is_same(OmegaConf.create(one), OmegaConf.create(other))


def test_types_and_flags_are_compared():
    """A value of the wrong type is refused in one config, and accepted in the other."""
    typed, plain = OmegaConf.structured(Typed), OmegaConf.create({"rate": 0.5})
    assert is_same(typed, OmegaConf.structured(Typed))
    assert not is_same(typed, OmegaConf.create(OmegaConf.to_container(typed)))
    flagged = OmegaConf.create({"rate": 0.5})
    OmegaConf.set_struct(flagged, True)
    assert not is_same(plain, flagged)
    assert is_same(OmegaConf.create({"a": float("nan")}), OmegaConf.create({"a": float("nan")}))
