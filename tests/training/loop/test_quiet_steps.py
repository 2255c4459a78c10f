"""What forge calls in a step in which nothing happens, which is most of what it costs.

Calls are counted, since a time depends on the machine.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from updates import a_run

import forge

FORGE = str(Path(forge.__file__).parent)


class Calls:
    """The fewest calls of forge's functions while it was open; a generator that continues counts.

    In some steps the time has come for something, such as the progress of each second.
    """

    def __init__(self):
        self.num = math.inf

    def __enter__(self):
        self._before, self._count = sys.getprofile(), 0
        sys.setprofile(self._look)

    def __exit__(self, *_):
        sys.setprofile(self._before)
        self.num = min(self.num, self._count)

    def _look(self, frame, event, argument):
        self._count += event == "call" and frame.f_code.co_filename.startswith(FORGE)


@pytest.fixture(params=[1, 40])
def training(request):
    """A loss, and the model and the optimizer of a run; as many calls for a large model."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(request.param)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)  # a large rate gives NaN by chance

    def loss():
        found = model(torch.ones(2)).sum()
        found.backward()
        return found

    return loss, {"model": model, "optimizer": optimizer}


def test_steps_of_run_steps(tmp_path, training):
    """A watcher that does nothing still has to be asked: each further call counts."""
    (loss, objects), between, update = training, Calls(), Calls()
    with a_run(tmp_path, **objects) as run:
        steps = iter(run.steps(9, DataLoader(torch.ones(20, 2))))
        for _ in range(8):
            with between:
                next(steps)
            found = loss()
            with update:
                run.update(found, objects["optimizer"])
        list(steps)
    assert between.num <= 60  # seven of them if there is a page for heartbeats
    assert update.num <= 30


def test_steps_of_a_loop_of_somebody_else_s(tmp_path, training):
    """The parameters of a large model were collected by name in each step: 346 calls."""
    (loss, objects), check, boundary = training, Calls(), Calls()
    with a_run(tmp_path, **objects) as run:
        run.begin()
        for step in range(1, 9):
            found = loss()
            with check:
                assert run.should_step(found)
            objects["optimizer"].step()
            objects["optimizer"].zero_grad()
            with boundary:
                run.boundary(step)
        run.end_loop()
    assert check.num <= 20
    assert boundary.num <= 60


def test_batches_that_are_read_ahead(tmp_path):
    """The whole place in the loader was collected before each batch: 80 calls."""
    loader, batch = (
        forge.data.resumable(DataLoader(torch.ones(20, 2), shuffle=True), ahead=1),
        Calls(),
    )
    batches = iter(loader)
    for _ in range(8):
        with batch:
            next(batches)
    assert batch.num <= 42
