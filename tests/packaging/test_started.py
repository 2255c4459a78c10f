"""`started.Popen`: what the tests hold on to so that one failure stays one."""

import os
import signal
import subprocess
import sys

from started import Popen, ended_here

from forge.process import processes


def test_a_test_that_fails_leaves_no_process():
    """Neither the one it started nor, in a session of its own, what that one started."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with ended_here():
        leader = Popen([sys.executable, "-c", script], **options)
        child = int(leader.stdout.readline())
        beside = Popen(["sleep", "600"])
    assert leader.returncode == beside.returncode == -signal.SIGKILL
    assert leader.stdin.closed
    assert processes.wait_gone([child], 60) == []


def test_what_a_fixture_for_several_tests_started_stays():
    with ended_here():
        outer = Popen(["sleep", "600"])
        with ended_here():
            inner = Popen(["sleep", "600"])
        assert inner.returncode == -signal.SIGKILL
        os.kill(outer.pid, 0)
        assert outer.poll() is None
