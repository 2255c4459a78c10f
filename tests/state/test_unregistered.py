"""Objects that belong to registered ones, but were not given to `forge.Run`, are named."""

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel

import forge
from forge.errors import ExitCode
from forge.state import unregistered


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Sharpness(torch.optim.Optimizer):
    """SAM as commonly written: it steps another optimizer, which has the same groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups


@pytest.mark.parametrize("make", [lambda o: ExponentialLR(o, 0.9), ReduceLROnPlateau])
def test_a_schedule_of_a_registered_optimizer(make, model, optimizer):
    schedule = make(optimizer)
    (found,) = unregistered.problems({"model": model, "optimizer": optimizer})
    assert found.startswith(f"the {type(schedule).__name__} sets the learning rate of `optimizer`")
    assert unregistered.problems({"model": model, "optimizer": optimizer, "s": schedule}) == []


def test_a_schedule_that_another_one_steps_is_saved_with_it(model, optimizer):
    parts = [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]
    schedule = SequentialLR(optimizer, parts, [3])
    assert unregistered.problems({"optimizer": optimizer, "schedule": schedule}) == []


def test_a_schedule_that_nobody_holds_any_more(model, optimizer):
    """For example, the script has replaced it by another one."""
    schedule = ExponentialLR(optimizer, 0.9)
    schedule.itself = schedule
    del schedule
    assert unregistered.problems({"optimizer": optimizer}) == []


def test_an_average_of_weights(model):
    """An average of another fold, which was given to its Run, is not a problem."""
    average = AveragedModel(model)
    (found,) = unregistered.problems({"model": model})
    assert found.startswith("the averages of the AveragedModel are not saved")
    assert unregistered.problems({"model": model, "average": average}) == []
    assert unregistered.problems({"model": torch.nn.Linear(2, 2)}) == []


def test_an_optimizer_inside_another(model):
    """No state_dict of a registered object has its momentum."""
    outer = Sharpness(model.parameters())
    (found,) = unregistered.problems({"outer": outer})
    assert found.startswith("`outer.base_optimizer` is an optimizer inside the optimizer `outer`")
    assert unregistered.problems({"outer": outer, "inner": outer.base_optimizer}) == []


def test_the_run_ends_before_its_first_step(tmp_path, model, optimizer, caplog):
    """With exit code 78, which shows that another start would not help."""
    schedule = ExponentialLR(optimizer, 0.9)
    policy = {"checkpoint": {"dir": str(tmp_path / "job")}}
    run = forge.Run(policy, model=model, optimizer=optimizer)
    with pytest.raises(forge.Exit) as error, run:
        run.steps(3)
    assert error.value.code == ExitCode.BAD_CONFIG
    assert "forge.Run(…, schedule=schedule)" in caplog.text
    assert schedule.last_epoch == 0
