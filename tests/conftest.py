"""What all tests share: one thread each, and no signal handler left behind."""

import signal

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _handlers_are_restored():
    """A test that leaves a handler behind would change the tests after it."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
