"""A connection that drops, and processes that began with signals ignored."""

import fcntl
import json
import os
import pty
import select
import signal
import termios

import pytest
import warm
from forked import ForkedJob
from harness import Job, Process, told, wait_for
from rows import few
from started import Popen


def verdict(job):
    return json.loads((job.checkpoints / ".forge" / "verdict.json").read_text())


@pytest.mark.parametrize(
    ("prints", "line"),
    [
        pytest.param("after", '"$@"; true', id="after", marks=pytest.mark.proofs),
        pytest.param("before", '"$@"; true', id="before", marks=pytest.mark.proofs),
        pytest.param("after", '"$@" | tee "$3/tee"; true', id="tee"),
    ],
)
def test_a_terminal_that_is_gone_is_a_stop(tmp_path, prints, line):
    """ssh drops: the shell is gone, and from then on each print of the loop is an error.

    That is in the middle of a step: what was saved before is all there is.
    """
    job = ForkedJob(tmp_path / "job", "hangup.py", prints=prints)
    leader, follower = pty.openpty()
    shell = Popen(
        ["bash", "-c", line, "bash", *job.command],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: (
            signal.signal(signal.SIGHUP, signal.SIG_DFL),
            fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        ),
    )
    os.close(follower)

    def pid_of_the_loop():
        if select.select([leader], [], [], 0)[0]:
            os.read(leader, 65536)  # or its prints would wait for us
        return told(job.directory / "ready")

    pid = int(wait_for(pid_of_the_loop, shell, "the loop"))
    os.close(leader)
    handle = os.pidfd_open(pid)
    assert select.select([handle], [], [], 60)[0], "the job has ended"
    os.close(handle)
    assert shell.wait(60) == -signal.SIGHUP
    assert verdict(job)["exit_code"] == 129
    job.spec["steps"] = verdict(job)["step"] + 3
    assert job.run(FORGE_RESUME="changed") == 0
    assert job.steps_repeated[0] <= 2


IGNORED = """
import signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_IGN)
sys.argv[:] = sys.argv[2:]
exec(open(sys.argv[0]).read())
"""
"""As a process begins in which somebody else ignored a signal."""


@pytest.mark.parametrize(
    ("line", "number"),
    few(
        1,
        [(None, signal.SIGHUP), ('exec nohup "$@"', signal.SIGHUP), ('"$@" & wait', signal.SIGINT)],
    ),
    ids=["hangup", "nohup", "background"],
)
def test_what_was_ignored_as_the_process_began_stays_ignored(tmp_path, line, number):
    """nohup is asked for so that a hangup stops nothing, and `&` so that a Ctrl+C does not."""
    job = Job(tmp_path / "job", "stages.py", stage="loop")
    python, *arguments = job.command
    if line is None:
        command, popen = [python, "-c", IGNORED, str(int(number)), *arguments], warm.Popen
    else:
        command, popen = ["bash", "-c", line, "bash", *job.command], Popen
    process = Process(command, job.directory / "output.txt", popen=popen)
    process.wait_for((job.directory / "ready").exists, "the stage")
    os.kill(max(process.session_pids()), number)
    (job.directory / "go").touch()
    assert process.wait() == 0
    assert job.directory.joinpath("events.txt").read_text().splitlines()[-1] == "after"
    assert not [e for e in job.history.attempts[0].events if e["kind"] == "stop"]
