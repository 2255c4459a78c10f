"""Impossible generator states and numbers of ranks: refused before forge does any work for them."""

import json
import signal

import numpy
import pytest
import torch
from nan_trainer import outliving
from stores import STATE, rewrite_manifest
from updates import a_run

import forge
from forge.checkpoint.format.manifest import entry_of


@pytest.fixture(autouse=True)
def _lives_on():
    """Interrupts a test that hangs, which would otherwise use up the time of the whole test run."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    with outliving():
        yield
    signal.alarm(0)


def train(directory, *, until=None):
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    policy = {"checkpoint": {"dir": str(directory), "every_steps": 2, "every_s": None}}
    with a_run(directory, policy, model=model) as run:
        for step in run.steps(6):
            if step == 1:
                run.state["draws"] = {"numpy": numpy.random.default_rng(3)}
                run.state["mask"] = torch.Generator().manual_seed(1)
            if step == until:
                raise RuntimeError("killed")
    return run


def damage(directory, old, new):
    """Edit the newest checkpoint, and update its checksums."""
    path = directory / "step_4"
    text = (path / STATE).read_text()
    assert old in text
    (path / STATE).write_text(text.replace(old, new))
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    rewrite_manifest(path, files=files | {STATE: entry_of((path / STATE).read_bytes())})


@pytest.mark.parametrize("device", ["cuda:99", "meta", "xla"])
def test_a_generator_of_a_device_that_is_not_here_is_one_error(tmp_path, device):
    """An error and not a traceback."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, until=5)
    damage(tmp_path, '"device": "cpu"', f'"device": "{device}"')
    with pytest.raises(forge.Exit, match=f"a random number generator on {device}") as caught:
        train(tmp_path)
    assert caught.value.code == 74


@pytest.mark.parametrize("content", ['{"kind": 3', '{"kind": null'])
def test_a_generator_of_nonsense_is_damage(tmp_path, content):
    """The run resumes from the previous checkpoint."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, until=5)
    damage(tmp_path, '{"path": ["mask"], "kind": "torch"', content + ', "path": ["mask"]')
    assert train(tmp_path).resumed_from == "step_2"


@pytest.mark.parametrize("size", [1_000_000_000, 2, 0, -1])
def test_a_number_of_ranks_whose_files_are_not_there_is_damage(tmp_path, size):
    """The list of their file names alone would take all the memory."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, until=5)
    rewrite_manifest(tmp_path / "step_4", world_size=size)
    assert train(tmp_path).resumed_from == "step_2"


@pytest.mark.parametrize("created", ["NaN", "1e300", "-Infinity"])
def test_a_time_that_is_none_is_damage(tmp_path, created):
    """Otherwise `forge show` would end with a traceback."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, until=5)
    rewrite_manifest(tmp_path / "step_4", created=float(created))
    assert train(tmp_path).resumed_from == "step_2"
