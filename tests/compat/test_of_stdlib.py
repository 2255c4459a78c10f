"""What forge needs of the private parts of the standard library and of NumPy's generator."""

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
from multiprocessing import shared_memory

import numpy as np
import pytest
from contracts import contract

from forge.compat import of_stdlib


def test_interpreter_flags():
    """A job's process is started as the launcher was: with the same asserts and warnings."""
    code = "from forge.compat import of_stdlib; print(of_stdlib.interpreter_flags())"
    flags = ["-O", "-Werror", "-Xutf8=1"]
    with contract(of_stdlib.interpreter_flags):
        done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)
        assert "".join(eval(done.stdout)).replace("-B", "") == "".join(flags), done.stderr


def test_resource_tracker_pid():
    """A stop that ended it would leave shared memory behind."""
    with contract(of_stdlib.resource_tracker_pid):
        block = shared_memory.SharedMemory(create=True, size=1)  # the first one starts the tracker
        block.close()
        block.unlink()
        os.kill(of_stdlib.resource_tracker_pid(), 0)
        assert multiprocessing.resource_tracker is not None


def test_resource_tracker_pid_where_none_was_started():
    """Most jobs have none."""
    code = "from forge.compat import of_stdlib; print(of_stdlib.resource_tracker_pid())"
    with contract(of_stdlib.resource_tracker_pid):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "None\n", done.stderr


def test_options():
    """Shells complete the options of a command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("path")
    with contract(of_stdlib.options):
        assert of_stdlib.options(parser) == ["--follow", "--help", "-f", "-h"]


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
    with contract(of_stdlib.python_memory, of_stdlib.object_memory):
        for _ in range(2):
            state, before = random.getstate(), of_stdlib.python_memory()
            assert of_stdlib.python_memory() == before
            use()
            assert (of_stdlib.python_memory() == before) is (random.getstate() == state)


@pytest.mark.parametrize("use", OF_NUMPY)
def test_numpy_memory(use):
    """As for python's generator."""
    with contract(of_stdlib.numpy_memory):
        for _ in range(2):
            state, before = str(np.random.get_state(legacy=False)), of_stdlib.numpy_memory(np)
            assert of_stdlib.numpy_memory(np) == before
            use()
            is_same = str(np.random.get_state(legacy=False)) == state
            assert (of_stdlib.numpy_memory(np) == before) is is_same


def test_numpy_memory_of_another_generator():
    """It is never taken for an unused one: capturing it is refused."""
    own = np.random.get_bit_generator()
    with contract(of_stdlib.numpy_memory):
        np.random.set_bit_generator(np.random.PCG64(1))
        try:
            assert of_stdlib.numpy_memory(np) != of_stdlib.numpy_memory(np)
        finally:
            np.random.set_bit_generator(own)
