"""Hyperparameters that the script builds: their record, and what differs from it at a resume."""

import torch
from torch.optim import lr_scheduler as schedules

from forge.state.initial_hyperparameters import InitialHyperparameters


def objects(lr=0.1, length=10, **options):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    schedule = schedules.CosineAnnealingLR(optimizer, length)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def listed(now, before):
    recorded = InitialHyperparameters(before).record
    return [str(one) for one in InitialHyperparameters(now).kept(recorded)]


def test_values_that_the_script_builds_otherwise_are_listed():
    """Loading replaces them by those of the checkpoint."""
    assert listed(objects(), objects()) == []
    assert listed(objects(betas=(0.5, 0.9), length=20), objects()) == [
        "optimizer.param_groups[0].betas: [0.9, 0.999] before, [0.5, 0.9] now",
        "schedule.T_max: 10 before, 20 now",
    ]


def test_another_class_and_other_groups_are_listed():
    first = objects()
    groups = [{"params": [one]} for one in first["model"].parameters()]
    assert "optimizer.(groups): 1 before, 2 now" in listed(
        {"optimizer": torch.optim.AdamW(groups)}, first
    )
    assert "optimizer.(class): AdamW before, SGD now" in listed(
        {"optimizer": torch.optim.SGD(groups)}, first
    )


def test_an_object_that_was_not_there_is_not_listed():
    assert listed(objects(), {}) == []


class Odd:
    """An object of a user's own class."""

    def __init__(self, seed):
        self.seed = seed

    def state_dict(self):
        return {"seed": self.seed}

    def load_state_dict(self, state):
        self.seed = state["seed"]


def test_what_json_does_not_have_is_left_out_of_the_record():
    assert InitialHyperparameters({"odd": Odd(torch.tensor(1j))}).record == {
        "odd": {"(class)": "Odd"}
    }


def test_what_a_user_s_object_has_drawn_is_no_setting():
    """An order of a million indices belongs to the checkpoint, not to this record."""
    drawn = Odd(list(range(101)))
    assert InitialHyperparameters({"odd": drawn}).record == {"odd": {"(class)": "Odd"}}
    assert listed({"odd": Odd(list(range(7, 200)))}, {"odd": drawn}) == []
