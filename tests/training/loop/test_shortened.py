"""Trainings that `forge rehearse` shortens: few steps, in which everything still happens."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import forge
from forge.jobdir import ledger
from forge.training.loop import step_limit

LOADERS = {
    "DataLoader": lambda: DataLoader(range(5000), 1),
    "list": lambda: list(range(5000)),
    "iterator": lambda: iter(range(5000)),
}


@pytest.fixture(params=[True, False], ids=["shortened", "whole"])
def is_short(request, monkeypatch):
    if request.param:
        monkeypatch.setenv(step_limit.VARIABLE, "12")
    return request.param


def a_run(tmp_path, every_steps=500):
    policy = {"checkpoint": {"dir": str(tmp_path / "job"), "every_steps": every_steps}}
    return forge.Run(policy, model=torch.nn.Linear(1, 1))


def saves(tmp_path):
    (attempt,) = ledger.read(tmp_path / "job").attempts
    return [one["step"] for one in attempt.events if one["kind"] == "save"]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_flat_loop_has_three_passes_with_evaluations_and_saves(kind, tmp_path, is_short):
    """An iterator cannot start again, so it has one pass with all steps."""
    seen, evaluated = [], []
    with a_run(tmp_path) as run:
        run.every(100, at_end=True)(evaluated.append)
        for _, batch in run.steps(200, LOADERS[kind]()):
            seen.append(int(batch))
    if not is_short:
        assert seen == list(range(200))
        assert evaluated == [100, 200]
        return
    assert seen == (list(range(12)) if kind == "iterator" else [0, 1, 2, 3] * 3)
    assert evaluated == [4, 8, 12]
    assert {2, 4, 6, 8, 10} <= set(saves(tmp_path))


@pytest.mark.parametrize("length", [2, 50])
def test_epochs_end_once_there_were_enough_steps_and_two_of_them(length, tmp_path, is_short):
    seen, evaluated = [], []
    with a_run(tmp_path) as run:
        run.every(epochs=5)(evaluated.append)
        for epoch in run.epochs(10):
            for _, batch in run.batches(list(range(length))):
                seen.append((epoch, batch))
    if not is_short:
        assert len(seen) == 10 * length
        assert len(evaluated) == 2
        return
    passes = [list(some) for _, some in itertools.groupby(seen, lambda one: one[0])]
    assert [len(one) for one in passes] == ([2] * 6 if length == 2 else [4] * 3)
    assert len(evaluated) == len(passes)


def test_loops_that_follow_each_other_are_shortened_each(tmp_path, is_short):
    numbers = []
    with a_run(tmp_path) as run:
        for end in (100, 300):
            numbers.append(sum(1 for _ in run.steps(end)))
    assert numbers == ([12, 12] if is_short else [100, 200])
