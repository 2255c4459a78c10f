"""A site's own checks: true commands."""

import os
import subprocess
import threading
from pathlib import Path

import pytest
from harness import until
from started import Popen

from forge.config.schema import CommandCheckConfig
from forge.health import command
from forge.health.check import Context, make

SHELL = ["sh", "-c"]


def answer(run, folder, timeout_s=60.0, **given):
    check = command.check("nhc", CommandCheckConfig(run, timeout_s))
    return make(check, Context(folder, folder, **given))


def _stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_gone(pid):
    try:
        return _stat(pid)[0] in "ZX"
    except FileNotFoundError:
        return True


def test_exit_code_0_passes_and_any_other_fails_with_the_last_line(tmp_path):
    good = answer([*SHELL, "echo all well"], tmp_path).finding
    assert (good.is_failed, good.value) == (False, "exit code 0: all well")
    bad = answer([*SHELL, "echo fine; echo no fan >&2; echo; exit 3"], tmp_path).finding
    assert (bad.is_failed, bad.value) == (True, "exit code 3: no fan")
    assert answer(["true"], tmp_path).finding.value == "exit code 0, and printed nothing"
    silent = answer(["false"], tmp_path).finding
    assert silent.value == "exit code 1, and printed nothing"
    crashed = answer([*SHELL, "kill -SEGV $$"], tmp_path).finding
    assert crashed.value.startswith("killed by signal 11")


@pytest.mark.parametrize("run", [["no-such-program"], ["/dev/null"], ["a\0b"]])
def test_a_command_that_cannot_be_started_fails_and_says_so(run, tmp_path):
    found = answer(run, tmp_path).finding
    assert found.is_failed
    assert found.value.startswith("the command cannot be started: ")


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path):
    """Otherwise each check would leave a hanging process on each node, every five minutes."""
    script = f"sleep 600 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/self; wait"
    found = answer([*SHELL, script], tmp_path, timeout_s=1.0)
    assert found.finding.is_failed
    assert found.finding.value == "no answer within 1 s"
    for name in ("self", "child"):
        pid = int((tmp_path / name).read_text())
        until(lambda pid=pid: is_gone(pid), "end of the command")


def test_a_command_ends_when_it_ends_whoever_has_its_output_open(tmp_path):
    """A daemon that it starts inherits the pipe; and does not stay either."""
    script = f"sleep 600 & echo $! > {tmp_path}/child; echo bad; exit 1"
    found = answer([*SHELL, script], tmp_path).finding
    assert found.value == "exit code 1: bad"
    pid = int((tmp_path / "child").read_text())
    until(lambda: is_gone(pid), "end of what it has started")


def test_of_much_output_the_end_is_kept_and_stdin_is_empty(tmp_path):
    found = answer([*SHELL, "cat; yes | head -c 3000000; echo last; exit 1"], tmp_path).finding
    assert found.value == "exit code 1: last"


def test_a_command_whose_end_somebody_else_has_collected_is_no_verdict(tmp_path, monkeypatch):
    """`os.wait()` in the user's code: its exit code is not known."""
    wait = os.waitid

    def after_somebody(kind, pid, how):
        wait(kind, pid, os.WEXITED)
        return wait(kind, pid, how)

    monkeypatch.setattr(os, "waitid", after_somebody)
    found = answer(["false"], tmp_path)
    assert (found.finding, found.error.partition(":")[0]) == (None, "ChildProcessError")


def test_what_it_has_printed_is_read_though_it_has_ended_before_anybody_looked():
    """The last line says why, and is printed last."""
    process = Popen(["echo", "no fan"], stdout=subprocess.PIPE)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert command._followed(process, 60.0, threading.Event()) == b"no fan\n"


def test_a_command_that_closes_its_output_is_waited_for_without_a_spin(tmp_path, monkeypatch):
    """A closed pipe is ready to be read all the time: training would have a core less."""
    reads, read = [], os.read
    monkeypatch.setattr(os, "read", lambda fd, size: (reads.append(size), read(fd, size))[1])
    script = "echo fine; exec >&- 2>&-; sleep 0.3; exit 3"
    found = answer([*SHELL, script], tmp_path).finding
    assert found.value == "exit code 3: fine"
    assert reads.count(1 << 20) <= 3


@pytest.mark.parametrize("script", ["kill -TERM $$", "exit 143", "kill -USR2 $$", "exit 130"])
def test_a_command_that_is_stopped_with_the_job_says_nothing_of_the_node(script, tmp_path):
    """Slurm signals all processes of a job at once: a preemption must exclude no node."""
    found = answer([*SHELL, script], tmp_path)
    assert found.finding is None
    assert "was stopped by a signal" in found.error


def test_a_command_is_killed_once_nobody_waits_for_it(tmp_path):
    stopped = threading.Event()
    stopped.set()
    found = answer(
        [*SHELL, f"echo $$ > {tmp_path}/self; sleep 600"], tmp_path, 3600.0, stopped=stopped
    )
    assert found.finding is not None  # and whoever has stopped it asks for nothing


def test_it_has_the_environment_of_the_task_and_no_zombie_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = answer([*SHELL, "echo job $SLURM_JOB_ID"], tmp_path).finding
    assert found.value == "exit code 0: job 17"
    children = [
        entry
        for entry in os.listdir("/proc")
        if entry.isdigit() and _is_zombie_of(int(entry), os.getpid())
    ]
    assert children == []


def _is_zombie_of(pid, parent):
    try:
        state, found = _stat(pid)[:2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state == "Z" and int(found) == parent
