"""The shell at the top of a task: what comes before anybody can hear it is kept, and acted on."""

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from shutil import which

import pytest
from harness import Process
from plans import planned

from forge.jobdir.job_files import REPORT, forge_dir, read_json
from forge.jobdir.plan import read
from forge.slurm import step

SHELLS = [shell for shell in ("sh", "dash", "bash", "busybox") if which(shell)]
if "dash" in SHELLS and os.path.samefile(which("sh"), which("dash")):
    SHELLS.remove("sh")

TASK = """
import signal, sys

def leave(number, frame):
    signal.signal(number, signal.SIG_IGN)
    sys.exit(75)

signal.signal(signal.SIGUSR2, leave)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
signal.sigtimedwait([], 60)
"""
"""Installs signal handlers first, and then unblocks the signals, as forge's tasks do."""


def command(shell, directory, *start):
    """The command that srun would run, in this shell."""
    forge_dir(directory).mkdir(exist_ok=True)
    return [
        *(["busybox", "sh"] if shell == "busybox" else [shell]),
        *step.command(directory, start)[1:],
    ]


def watched(shell, directory):
    """With a true supervisor, and TASK below it."""
    forge_dir(directory).mkdir(exist_ok=True)
    task = [sys.executable, "-I", "-S", "-c", TASK]
    planned(command=task, timeout_s=20.0, cwd=str(directory)).write(directory)
    root = step.__file__.rpartition("/forge/")[0]
    return command(shell, directory, *step.start([sys.executable, "-I", "-S"], root, directory))


@pytest.fixture(autouse=True)
def _hangups_are_heard():
    """Tests that run under nohup: a shell cannot trap what was ignored when it started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(params=SHELLS)
def shell(request):
    return request.param


@pytest.mark.parametrize("code", [0, 1, 69, 75, 127, 143])
def test_exit_codes_pass_through(shell, tmp_path, code):
    """srun's code is that of this shell."""
    start = ["sh", "-c", f"sleep 0.1; exit {code}"]
    assert subprocess.run(command(shell, tmp_path, *start)).returncode == code


def test_a_child_that_is_killed_gives_128_and_the_signal(shell, tmp_path):
    """The child is not started again, since it had begun."""
    start = ["sh", "-c", "echo >> ../begun; sleep 0.1; kill -KILL $$"]
    done = subprocess.run(command(shell, tmp_path, *start), cwd=forge_dir(tmp_path))
    assert done.returncode == 128 + signal.SIGKILL
    assert len((tmp_path / "begun").read_text()) == 1


def test_what_cannot_be_started_is_said(shell, tmp_path):
    """A container runtime that is not there, say."""
    done = subprocess.run(
        command(shell, tmp_path, "/no/such/program"), stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 127
    assert "/no/such/program" in done.stderr


def test_signals_are_written_down_and_the_child_lives(shell, tmp_path):
    """A child without signal handlers must not be killed by a signal."""
    script = "touch up; while [ ! -e go ]; do read x < fifo; done; cat .forge/early.3; exit 7"
    os.mkfifo(tmp_path / "fifo")
    process = Process(
        command(shell, tmp_path, "sh", "-c", script), tmp_path / "out", tmp_path, SLURM_PROCID="3"
    )
    process.wait_for((tmp_path / "up").exists, "start")
    early = forge_dir(tmp_path) / "early.3"
    for name in ("TERM", "HUP", "INT", "USR1", "USR2"):
        process.signal_session(getattr(signal, f"SIG{name}"))
        process.wait_for(lambda name=name: early.exists() and name in early.read_text(), name)
    (tmp_path / "go").touch()
    # Both ends: a child that sees "go" before it waits does not read, and this would block.
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    os.write(fifo, b"\n")
    assert process.wait() == 7
    os.close(fifo)
    assert process.output.split()[-5:] == ["TERM", "HUP", "INT", "USR1", "USR2"]


def test_a_signal_to_the_shell_alone_is_passed_on(shell, tmp_path):
    """Between the supervisor's look at what was written and its first handler nothing is lost."""
    process = Process(watched(shell, tmp_path), tmp_path / "out", tmp_path)
    process.wait_for(lambda: len(process.session_pids()) == 3, "start of the task")
    process.signal(signal.SIGUSR2)
    assert process.wait() == 75
    assert read_json(forge_dir(tmp_path) / REPORT)["code"] == 75


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.proofs)])
def test_a_signal_at_any_moment_is_acted_on(shell, tmp_path, times):
    """The signals begin with the shell's start, before the fork, Python and the supervisor."""
    rng = random.Random(shell)
    for number in range(times):
        directory = tmp_path / str(number)
        directory.mkdir()
        process = Process(watched(shell, directory), directory / "out", directory)
        process.wait_for(lambda pid=process.pid: _is_shell(pid, shell), "exec of the shell")
        if may_be_deaf := number < times / 5:
            signal.sigtimedwait([], rng.expovariate(1 / 0.002))
        else:
            process.wait_for(lambda one=process: one.catches(signal.SIGUSR2), "its first lines")
            signal.sigtimedwait([], rng.expovariate(1 / 0.02))
        process.signal_session(signal.SIGUSR2)
        code = process.wait()
        report = read_json(forge_dir(directory) / REPORT) or {}
        # Killed before its first line: no child has started, and the wrapper sees the signal.
        is_killed = may_be_deaf and code == -signal.SIGUSR2
        assert is_killed or (code, report["code"]) == (75, 75), process.output


def _is_shell(pid, shell):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().startswith(shell.encode())


def test_an_early_ctrl_c_comes_to_the_task(tmp_path):
    """The supervisor passes no SIGINT on, since the terminal, or Slurm, tells the task itself."""
    start = watched("sh", tmp_path)
    plan = read(tmp_path)
    task = TASK.replace("SIGUSR2", "SIGINT").replace("75", "130")
    replace(plan, command=[*plan.command[:-1], task]).write(tmp_path)
    (forge_dir(tmp_path) / step.EARLY).write_text("INT\n")
    assert subprocess.run(start, timeout=60).returncode == 130
