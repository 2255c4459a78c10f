"""How modules behave, which no `state_dict` says: training or evaluating, and dropout's p."""

import torch

from forge.state import restoring
from forge.state.registry import StateRegistry


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5)
    )


def test_modes_and_rates_of_dropout_come_back():
    """A BatchNorm that was frozen by eval() would go on averaging after a resume."""
    trained = net()
    trained[1].eval()
    trained[2].p = 0.1
    saved = StateRegistry({"net": trained}).capture()
    resumed = net()
    restoring.load(StateRegistry({"net": resumed}), saved)
    assert [one.training for one in resumed.modules()] == [True, True, False, True]
    assert resumed[2].p == 0.1


def test_what_is_saved_is_how_it_was_at_that_time():
    """An evaluation that is under way when a job ends has switched nothing for the next."""
    trained = net()
    saved = StateRegistry({"net": trained}).capture()
    trained.eval()
    restoring.load(StateRegistry({"net": trained}), saved)
    assert all(one.training for one in trained.modules())
