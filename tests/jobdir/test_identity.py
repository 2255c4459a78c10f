"""When two starts are the same job."""

import sys
from dataclasses import dataclass
from enum import Enum

import pytest
from omegaconf import OmegaConf

from forge.jobdir import config_changes, config_file, identity
from forge.jobdir.identity import Identity


class Color(Enum):
    red = 1


@dataclass
class Typed:
    number: int = "${oc.env:NUMBER}"
    color: Color = Color.red


def test_interpolations_are_compared_as_they_stand_in_the_file():
    """What they refer to is compared where it stands, or changes by itself (`${now:…}`)."""
    cfg = OmegaConf.create(
        """
        hydra: {job: {num: 3}}
        resilience: {nan: {action: halt}}
        stamp: ${now:%H-%M-%S}
        title: run-${stamp}-${deep.width}
        home: "${oc.env:HOME,${deep.width}}/x"
        out: ${hydra:runtime.output_dir}
        num: ${hydra.job.num}
        deep: {width: 3, twice: "${deep.width}", list: ["${stamp}", 1.0], none: null, empty: {}}
        literal: 'lr-\\${lr}'
        missing: ???
        broken: ${nowhere}
        """
    )
    deep = {
        "width": 3,
        "twice": "${deep.width}",
        "list": ["${stamp}", 1.0],
        "none": None,
        "empty": {},
    }
    assert identity.as_written(cfg) == {
        "stamp": "${now:%H-%M-%S}",
        "title": "run-${stamp}-${deep.width}",
        "home": "${oc.env:HOME,${deep.width}}/x",
        "out": "${hydra:runtime.output_dir}",
        "num": "${hydra.job.num}",
        **{f"deep.{key}": value for key, value in deep.items()},
        "literal": r"lr-\${lr}",
        "missing": "???",
        "broken": "${nowhere}",
    }


def test_a_schema_s_types_do_not_stand_in_the_way():
    cfg = OmegaConf.create({"typed": OmegaConf.structured(Typed), "by": {Color.red: 1, 2: "x"}})
    expected = {"typed.number": "${oc.env:NUMBER}", "typed.color": "red", "by.red": 1, "by.2": "x"}
    assert identity.as_written(cfg) == expected


@pytest.mark.parametrize(
    ("one", "other", "keys"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": True}, {"a": 1}, ["a"]),
        ({"a": None}, {}, ["a"]),
        ({"a": {"x": 1}}, {"a": {"y": 1}}, ["a.x", "a.y"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a"]),
    ],
)
def test_the_order_of_keys_does_not_count_and_every_other_difference_does(one, other, keys):
    one, other = (identity.as_written(OmegaConf.create(cfg)) for cfg in (one, other))
    assert [change.key for change in config_changes.changes(one, other)] == keys


def test_program_name_and_an_unknown_config_are_part_of_it():
    base = Identity("train", "", {"a": 1})
    assert config_changes.differences(base, base) == []
    for other in (Identity("eval", "", {"a": 1}), Identity("train", "f", {"a": 1})):
        assert len(config_changes.differences(base, other)) == 1
    found = config_changes.differences(base, Identity("train", "", None))
    assert "not known" in str(found[0])
    assert config_changes.differences(Identity("x", "", None), Identity("x", "", None)) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/train.py", "train"),
        ("train.py", "train"),
        ("/b/pkg/__main__.py", "pkg"),
        ("", "python"),
    ],
)
def test_the_program_is_its_name_without_its_place(tmp_path, monkeypatch, path, name):
    monkeypatch.setattr(sys, "argv", [path])
    assert identity.current(tmp_path, "fold").program == name


def test_a_config_that_is_asked_for_is_the_one_until_it_is_taken_or_forgotten(tmp_path):
    def current():
        return identity.current(tmp_path, "").config

    config_file.write(tmp_path / ".forge" / identity.START, {"written": {"a": 1}})
    config_file.write(identity.asked(tmp_path) / identity.START, {"written": {"a": 2}})
    assert (current(), identity.stored(tmp_path)) == ({"a": 2}, {"a": 1})
    identity.forget_asked(tmp_path)
    assert current() == {"a": 1}
    config_file.write(identity.asked(tmp_path) / identity.START, {"written": {"a": 3}})
    identity.take_asked(tmp_path)
    assert (current(), identity.stored(tmp_path)) == ({"a": 3}, {"a": 3})
