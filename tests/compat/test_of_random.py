"""The memory of the global generators."""

import random

import numpy as np
import pytest
from contracts import contract

from forge.compat import of_random

OF_PYTHON = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.shuffle([1, 2]),
    lambda: random.seed(1),
]
OF_NUMPY = [
    np.random.rand,
    np.random.normal,
    lambda: np.random.shuffle([1, 2]),
    lambda: np.random.seed(1),
]


@pytest.mark.parametrize("use", OF_PYTHON)
def test_python_memory(use):
    """A state that was not read again would lose a draw: the second half of a pair, too."""
    with contract(of_random.python_memory, of_random.object_memory):
        for _ in range(2):
            state, before = random.getstate(), of_random.python_memory()
            assert of_random.python_memory() == before
            use()
            assert (of_random.python_memory() == before) is (random.getstate() == state)


@pytest.mark.parametrize("use", OF_NUMPY)
def test_numpy_memory(use):
    """As for python's generator."""
    with contract(of_random.numpy_memory):
        for _ in range(2):
            state, before = str(np.random.get_state(legacy=False)), of_random.numpy_memory(np)
            assert of_random.numpy_memory(np) == before
            use()
            is_same = str(np.random.get_state(legacy=False)) == state
            assert (of_random.numpy_memory(np) == before) is is_same


def test_numpy_memory_of_another_generator():
    """It is never taken for an unused one: capturing it is refused."""
    own = np.random.get_bit_generator()
    with contract(of_random.numpy_memory):
        np.random.set_bit_generator(np.random.PCG64(1))
        try:
            assert of_random.numpy_memory(np) != of_random.numpy_memory(np)
        finally:
            np.random.set_bit_generator(own)
