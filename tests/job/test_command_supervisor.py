"""The supervisor of a command, where somebody else signals the command as well: on a cluster."""

import json
import os
import signal
import sys

import pytest
from harness import until, wait_for
from warm import Popen

from forge.process import processes

STARTER = """
import os, sys
from pathlib import Path
from forge.job import command
from forge.jobdir.plan import ExecPlan

folder, script, is_old, place = sys.argv[1:]
command._LATE_S = 600.0
command._BEGINNING_S = 0.0 if is_old == "old" else 600.0
out = os.open(f"{folder}/out.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
actions = {"TERM": "stop", "USR1": "requeue"}
report = Path(folder, place, "report.json")
found = command.CommandSupervisor(
    ["bash", "-c", script], dict(os.environ), out, actions, 60.0, report, os.getppid(), folder
)
found.is_signalled_by_others = True
sys.exit(found.run())
"""


@pytest.fixture
def supervised(tmp_path):
    def start(script, age="old", place="."):
        process = Popen(
            [sys.executable, "-c", STARTER, str(tmp_path), script, age, place],
            start_new_session=True,
        )
        wait_for((tmp_path / "ready").exists, process, "command that is ready")
        return process, processes.descendants(process.pid)[0]

    return start


def report(folder):
    return json.loads((folder / "report.json").read_text())


def test_a_command_that_is_somebody_else_s_has_its_own_end(tmp_path):
    """As `sudo` is: nobody here can signal it, and its exit code is what counts."""
    denied = "def denied(*_):\n    raise PermissionError\nos.killpg = denied\n"
    starter = STARTER.replace("found.is_signalled_by_others = True", denied)
    script = "touch ready; while [ ! -e go ]; do sleep 0.05; done; exit 7"
    process = Popen(
        [sys.executable, "-c", starter, str(tmp_path), script, "old", "."], start_new_session=True
    )
    wait_for((tmp_path / "ready").exists, process, "command that is ready")
    processes.send(process.pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(60) == 7
    assert report(tmp_path)["code"] == 7


def test_what_slurm_signals_itself_is_not_passed_on(supervised, tmp_path):
    """A second one would end what the first one's trap has started: the save."""
    script = "trap 'touch heard' TERM; touch ready; while [ ! -e go ]; do sleep 0.05; done"
    process, _ = supervised(script)
    processes.send(process.pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(60) == 0
    assert report(tmp_path)["stops"] == ["TERM"]
    assert not (tmp_path / "heard").exists()


def test_a_command_that_has_just_begun_is_told_of_a_signal_that_it_may_have_missed(
    supervised, tmp_path
):
    """Slurm has made its list of processes before this one was there."""
    script = "trap 'exit 4' TERM; touch ready; while true; do sleep 0.05; done"
    process, _ = supervised(script, "young")
    processes.send(process.pid, signal.SIGTERM)
    assert process.wait(60) == 4


def test_a_shell_that_is_gone_before_the_signal_has_come_to_us_leaves_its_group_the_time(
    supervised, tmp_path
):
    """bash dies at once, and what it was waiting for is in the middle of its save."""
    save = "while [ ! -e go ]; do sleep 0.05; done; touch saved; exit"
    child = f"trap '{save}' TERM; touch ready; while true; do sleep 0.05; done"
    process, command = supervised(f'bash -c "{child}"; true')
    os.killpg(command, signal.SIGTERM)
    until(lambda: command not in processes.descendants(process.pid), "end of the shell")
    processes.send(process.pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert report(tmp_path)["stops"] == ["TERM"]


def test_exit_code_0_after_a_signal_is_not_told_as_one_where_nothing_else_can_be(supervised):
    """On a full disk the supervisor has only its own exit code; a training would be lost by 0."""
    script = "trap 'exit 0' TERM; touch ready; while true; do sleep 0.05; done"
    process, _ = supervised(script, "young", "nowhere")
    processes.send(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
