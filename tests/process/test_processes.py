"""The processes below this one."""

import os

import pytest
from started import Popen

from forge.process import processes


def found_in_a_child(has_own_child):
    """What `processes.descendants` finds in a forked child, as its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            own = Popen(["sleep", "100"]) if has_own_child else None
            found = processes.descendants()
            if own is not None:
                own.kill()
                own.wait()
            code = found.count(own.pid) if own is not None else len(found)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("has_own_child", [False, True])
def test_a_process_finds_its_children(has_own_child):
    assert found_in_a_child(has_own_child) == has_own_child
