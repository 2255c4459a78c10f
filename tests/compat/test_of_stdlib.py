"""What forge needs of the standard library's private parts."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import shared_memory

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


MASK = """
import multiprocessing.resource_tracker, signal
from forge.process.processes import block_signals

with block_signals():
    multiprocessing.resource_tracker.ensure_running()
    print(*sorted(one.name for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_tracker_leaves_mask():
    """A process that is spawned next must not be killed by what Slurm sends to all of a step."""
    with contract(of_stdlib.tracker_leaves_mask):
        done = subprocess.run([sys.executable, "-c", MASK], capture_output=True, text=True)
        assert done.stdout == "SIGHUP SIGINT SIGTERM SIGUSR1 SIGUSR2\n\n", done.stderr
