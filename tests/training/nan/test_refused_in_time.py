"""State that cannot be saved or loaded is refused at the start, or as soon as it appears."""

import pytest
import torch
from nan_trainer import checkpoints, events, stop
from torch.utils.data import DataLoader
from updates import a_run

import forge


def halves():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    return model, torch.optim.Adam(model[0].parameters(), lr=0.1)


def unfreeze_at(directory, at, steps=6, stops=False):
    """A run that adds a parameter group before, in, or after its loop."""
    model, optimizer = halves()

    def add():
        optimizer.add_param_group({"params": list(model[1].parameters())})

    policy = {"checkpoint": {"dir": str(directory), "every_steps": 1, "every_s": None}}
    if at == "before":
        add()
    with a_run(directory, policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(steps):
            if step == at:
                add()
            loss = model(torch.randn(3, 2)).square().sum()
            loss.backward()
            run.update(loss, optimizer)
            if stops:
                stop()
        if at == "after":
            add()
    return run


@pytest.mark.parametrize(("at", "saved"), [(3, "step_3"), (5, "step_5"), ("after", "step_6")])
def test_a_parameter_group_that_is_added_in_the_loop_is_refused_before_it_is_saved(
    tmp_path, at, saved
):
    """Otherwise every later start would end with code 74, since the checkpoint does not fit it."""
    with pytest.raises(forge.Exit) as caught:
        unfreeze_at(tmp_path, at)
    assert caught.value.code == 78
    assert "optimizer: 1 parameter groups at the start" in caught.value.text
    assert "requires_grad_(False)" in caught.value.text
    assert max(checkpoints(tmp_path)) == saved
    again = unfreeze_at(tmp_path, at=None, steps=8)
    assert again.resumed_from == saved


def test_a_parameter_group_that_is_added_before_the_run_resumes(tmp_path):
    with pytest.raises(forge.Exit):
        unfreeze_at(tmp_path, at="before", stops=True)
    assert unfreeze_at(tmp_path, at="before").resumed_from == "step_1"


class Forgetful:
    def state_dict(self):
        raise AttributeError("no attribute 'position'")

    def load_state_dict(self, state):
        raise AssertionError("never saved")


class Prepared(DataLoader):
    """A library's wrapper of a loader: it has a `state_dict`, the loader inside has none."""

    def state_dict(self):
        return self.inner_state

    def load_state_dict(self, state):
        self.inner_state = state


def test_an_object_that_raises_when_it_is_asked_for_its_state_is_named_at_the_start(tmp_path):
    """A first call at the stop would cost all steps since the start."""
    with pytest.raises(forge.Exit) as caught, a_run(tmp_path, tracker=Forgetful()):
        raise AssertionError("the run has begun")
    assert caught.value.code == 78
    for part in ("tracker: ", "Forgetful.state_dict() raised AttributeError", "'position'", ".py:"):
        assert part in caught.value.text
    assert checkpoints(tmp_path) == set()


def test_a_loader_that_raises_when_it_is_asked_for_its_state_is_named_before_the_first_step(
    tmp_path,
):
    model, optimizer = halves()
    seen = []

    def run_all():
        with a_run(tmp_path, model=model, optimizer=optimizer) as run:
            seen.extend(step for step, _ in run.steps(4, Prepared(range(8))))

    with pytest.raises(forge.Exit) as caught:
        run_all()
    assert (caught.value.code, seen) == (78, [])
    assert "the loader: test_refused_in_time.Prepared" in caught.value.text
    assert "AttributeError" in caught.value.text
    (error,) = events(tmp_path, "error")
    assert error["code"] == 78


def test_a_second_loader_that_raises_is_named_as_well(tmp_path):
    model, optimizer = halves()
    with pytest.raises(forge.Exit) as caught, a_run(tmp_path, model=model, o=optimizer) as run:
        next(run.steps(4, [0], Prepared(range(8))))
    assert caught.value.code == 78
    assert "the loader: test_refused_in_time.Prepared" in caught.value.text
