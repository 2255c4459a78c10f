"""What forge needs of OmegaConf's private parts."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from contracts import contract, register_resolver
from omegaconf import OmegaConf

from forge.compat import of_omegaconf


@dataclass
class Inner:
    rates: list[float] = field(default_factory=lambda: [0.1])


@dataclass
class Schema:
    steps: int = 3
    anything: Any = None
    inner: Inner = field(default_factory=Inner)


def test_value_of():
    """Configs are written down as they stand in the file, interpolations and all."""
    cfg = OmegaConf.create({"a": 1, "b": "${a}", "c": {"d": "???"}, "e": [None], "f": "${c}"})
    with contract(of_omegaconf.value_of, of_omegaconf.child_of):
        values = {key: of_omegaconf.value_of(of_omegaconf.child_of(cfg, key)) for key in cfg}
        assert {key: values[key] for key in "abf"} == {"a": 1, "b": "${a}", "f": "${c}"}
        assert of_omegaconf.value_of(values["c"]["d"]) == "???"
        assert of_omegaconf.value_of(values["e"][0]) is None


def test_value_of_a_special_container():
    """One that is null, missing or an interpolation has no nodes to go through."""
    cfg = OmegaConf.structured(Schema)
    with contract(of_omegaconf.value_of, of_omegaconf.child_of):
        node = of_omegaconf.child_of(cfg, "inner")
        assert isinstance(of_omegaconf.value_of(node), dict)
        for special in ("???", "${anything}"):
            cfg.inner = special
            assert of_omegaconf.value_of(of_omegaconf.child_of(cfg, "inner")) == special
        assert of_omegaconf.value_of(OmegaConf.create({"a": None})) != None  # noqa: E711
        assert of_omegaconf.value_of(type(cfg)(None)) is None


def test_value_of_is_the_container_s_own():
    """A frozen config gets its keys back in the order that it was stored in."""
    cfg = OmegaConf.create({"a": 1, "b": 2})
    with contract(of_omegaconf.value_of):
        content = of_omegaconf.value_of(cfg)
        content["a"] = content.pop("a")
        assert list(cfg) == ["b", "a"]


def test_child_of():
    """Also where the config refuses to be asked for what it lacks."""
    cfg = OmegaConf.create({"a": None, "b": [5]})
    OmegaConf.set_struct(cfg, True)
    with contract(of_omegaconf.child_of):
        assert of_omegaconf.child_of(cfg, "lacking") is None
        assert of_omegaconf.child_of(cfg, "a") is not None
        assert of_omegaconf.value_of(of_omegaconf.child_of(cfg.b, 0)) == 5


def test_declared_type():
    """What a message says was expected, and whether 1e3 may stand for 1000."""
    cfg = OmegaConf.structured(Schema)
    with contract(of_omegaconf.declared_type, of_omegaconf.element_type):
        kinds = [of_omegaconf.declared_type(of_omegaconf.child_of(cfg, key)) for key in cfg]
        assert kinds == [int, Any, Inner]
        assert of_omegaconf.element_type(of_omegaconf.child_of(cfg, "steps")) is None
        assert of_omegaconf.element_type(of_omegaconf.child_of(cfg.inner, "rates")) is float
        assert of_omegaconf.element_type(OmegaConf.create({})) is Any


def test_full_key():
    """For messages."""
    cfg = OmegaConf.create({"a": {"b": [1, 2]}})
    with contract(of_omegaconf.full_key):
        assert of_omegaconf.full_key(of_omegaconf.child_of(cfg.a.b, 1)) == "a.b[1]"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("${a}/${.b}", set()),
        ("${now:%Y}", {"now"}),
        ("${oc.env:HOME,${hydra:runtime.cwd}}/${x}", {"oc.env", "hydra"}),
        (r"\${now:%Y}", set()),
    ],
)
def test_resolver_names(text, names):
    """Of a value that is another at every start, the one of the first start is stored."""
    with contract(of_omegaconf.resolver_names):
        assert of_omegaconf.resolver_names(text) == names


def test_resolvers():
    """A job's process gets those of the launcher, its own lambdas too."""
    name = "forge_test_contract"
    register_resolver(name, lambda: 7)
    with contract(of_omegaconf.resolvers, of_omegaconf.set_resolvers):
        found = of_omegaconf.resolvers()
        assert {name, "oc.env"} <= set(found)
        try:
            of_omegaconf.set_resolvers({key: one for key, one in found.items() if key != name})
            assert not OmegaConf.has_resolver(name)
        finally:
            of_omegaconf.set_resolvers(found)
        assert OmegaConf.create({"a": f"${{{name}:}}"}).a == 7
        OmegaConf.clear_resolver(name)
