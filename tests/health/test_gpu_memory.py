"""What other processes hold of a GPU's memory: who, and whether they go."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nvml_answers import NUMBER, FakeNvml, recorded
from started import Popen

from forge.config.schema import CheckAction
from forge.health import gpu_memory, nvml
from forge.health.check import Context
from forge.jobdir.job_files import TOKEN
from forge.process import processes

HIDDEN = 2**22 + 1
"""More than any process has."""

WAITS = [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"]
QUESTION = "ComputeRunningProcesses_v3 gpu0"


class Changing(FakeNvml):
    """Whose processes change each time that they are asked for."""

    changed = {}  # noqa: RUF012 - for a test, what else differs

    def __init__(self, *times):
        super().__init__(recorded("made_up_h100") | self.changed)
        self.times = list(times)

    def _answer(self, function, *args):
        if "RunningProcesses" in function:
            now = self.times.pop(0) if len(self.times) > 1 else self.times[0]
            mib = {pid: held * 2**20 if held is not None else None for pid, held in now.items()}
            self.answers[QUESTION] = [{"pid": p, "usedGpuMemory": b} for p, b in mib.items()]
        return super()._answer(function, *args)


class Counted(threading.Event):
    """Counts how often somebody waits, and does not."""

    waits = 0

    def wait(self, timeout=None):
        self.waits += 1
        return self.waits > 20


@pytest.fixture
def look(monkeypatch):
    """Look at GPU 0 while processes hold so many MiB of it: pid -> MiB, at one time or several."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_memory, "_knows_pids", lambda: True)

    def looked(*times, action="warn", **context):
        fake = Changing(*times)
        monkeypatch.setattr(nvml, "driver", lambda: fake)
        context = {"action": CheckAction[action], "stopped": Counted(), **context}
        found = gpu_memory.gpu_memory(Context(Path(), Path(), (0,), **context))
        return found, getattr(context["stopped"], "waits", 0)

    return looked


def waiting(*arguments, **variables):
    """Start a process that does nothing, with these in its environment; stands for another's."""
    environment = {**os.environ, **variables}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = Popen([*WAITS, *arguments], env=environment, **pipes)
    process.stdout.readline()  # in the midst of its start it has no command line yet
    return process


@pytest.fixture
def strangers(monkeypatch):
    """Let what a test starts be nobody's child."""
    monkeypatch.setattr(processes, "descendants", lambda: [])
    for names in gpu_memory.FAMILIES:
        for name in names:
            monkeypatch.delenv(name, raising=False)


def test_others_are_named_with_what_they_run(look, strangers):
    """Whoever reads it can end them, or ask whose they are."""
    one, two = waiting(), waiting()
    found, _ = look({one.pid: 400, two.pid: 9000})
    assert found.is_failed
    held = f"9400 MiB used by other processes: 9000 MiB by pid {two.pid} of user {os.getuid()} (`"
    assert held in found.value
    assert f"400 MiB by pid {one.pid}" in found.value
    assert "import sys" in found.value
    assert look({one.pid: 512})[0].is_failed is False


def test_a_command_line_is_cut_short_and_cannot_write_to_a_terminal(look, strangers):
    """Anybody chooses how theirs looks."""
    name = "\x1b[2J\n" + "x" * 200
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = Popen([name], executable=shutil.which("cat"), **pipes)
    process.stdin.write(b"here\n")
    process.stdin.flush()
    process.stdout.readline()
    found, _ = look({process.pid: 9000})
    assert f"(`?[2J?{'x' * 72}…`)" in found.value


def test_its_own_and_its_job_s_are_no_others(look, monkeypatch):
    """Its children, and the other tasks of its job wherever they stand."""
    assert not look({os.getpid(): 60000, waiting().pid: 9000})[0].is_failed
    monkeypatch.setattr(processes, "descendants", lambda: [])
    monkeypatch.setenv(TOKEN, "t1")
    assert look({waiting(**{TOKEN: "t2"}).pid: 9000})[0].is_failed
    assert not look({waiting(**{TOKEN: "t1"}).pid: 9000})[0].is_failed
    monkeypatch.delenv(TOKEN)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    assert not look({waiting(**step).pid: 9000})[0].is_failed
    assert look({waiting(**step | {"SLURM_STEP_ID": "1"}).pid: 9000})[0].is_failed


def test_a_size_that_is_not_known_fails_nothing(look, strangers):
    """Of a MIG instance, say, the driver may not let us know it."""
    found, _ = look({waiting().pid: None})
    assert not found.is_failed


def test_what_a_dead_process_held_is_waited_for(look, strangers):
    """A killed attempt's memory goes a moment after it: its successor is not to fail for that."""
    dead = waiting()
    dead.kill()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    for gone in (dead.pid, 2**22 + 1):
        found, waits = look({gone: 9000}, {gone: 9000}, {})
        assert (found.is_failed, waits) == (False, 2)
        found, _ = look({gone: 9000})
        assert f"9000 MiB by pid {gone}, which has ended" in found.value


def test_who_lives_is_waited_for_only_if_the_policy_acts(look, strangers, monkeypatch):
    """People share GPUs: each start would be a minute late, only to log the same."""
    pid = waiting().pid
    assert look({pid: 9000}, {})[1] == 0
    found, waits = look({pid: 9000}, {pid: 9000}, {}, action="exclude_node")
    assert (found.is_failed, waits) == (False, 2)
    found, waits = look({pid: 9000}, action="exclude_node")
    assert (found.is_failed, waits) == (True, 21)  # nobody waits for the answer any more
    monkeypatch.setattr(gpu_memory, "TIMEOUT_S", 5.0)
    found, waits = look({pid: 9000}, action="exclude_node")
    assert (found.is_failed, waits) == (True, 0)  # an answer that came later would be none


def test_of_many_processes_the_largest_are_named(look, monkeypatch):
    """A line for each of a hundred hides the one that counts."""
    monkeypatch.setattr(gpu_memory, "_described", lambda pid: f"pid {pid}")
    found, _ = look({HIDDEN + n: 1000 * n for n in range(1, 7)}, is_beside=True)
    named = [f"{n}000 MiB by pid {HIDDEN + n}" for n in (6, 5, 4, 3)]
    text = f"21000 MiB used by other processes: {', '.join(named)}, and by 2 more"
    assert found.value.endswith(f": {text}")


def test_of_a_gpu_that_is_split_nobody_is_accused(look, monkeypatch):
    """Who has the other parts of it (MIG) takes nothing from this one."""
    monkeypatch.setitem(Changing.changed, "MigMode gpu0", [1, 1])
    assert look({HIDDEN: 9000})[0] is None


def test_beside_training_nothing_is_waited_for(look, strangers):
    """The next look is a few minutes away."""
    found, waits = look({waiting().pid: 9000}, {}, action="exclude_node", is_beside=True)
    assert (found.is_failed, waits) == (True, 0)


def test_a_gpu_that_is_gone_is_the_other_check_s_to_tell(look, monkeypatch):
    """Nobody holds its memory any more."""
    monkeypatch.setitem(Changing.changed, "UUID gpu0", {"error": NUMBER["gpu_is_lost"]})
    assert look({HIDDEN: 9000})[0] is None


def test_in_a_container_nobody_is_accused(monkeypatch, look):
    """There the driver's numbers are not ours: our own process would be another's."""
    monkeypatch.setattr(gpu_memory, "_knows_pids", lambda: False)
    assert look({1: 9000})[0] is None


def test_a_process_that_is_hidden_is_not_taken_for_one_that_has_ended(look, monkeypatch):
    """Where /proc hides other people's processes, each start would wait a minute for them."""

    def refused(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    found, waits = look({HIDDEN: 9000})
    assert f"9000 MiB by pid {HIDDEN}, which is hidden" in found.value
    assert waits == 0
