"""The stacks of a process that does not answer."""

import faulthandler
import os
import signal
import sys

import pytest
from harness import until
from started import Popen
from stepwise import returned

from forge.process import stacks
from forge.process.progress import HeartbeatPage

STANDS = """
import os, sys, threading
from pathlib import Path
from forge.process import stacks
stacks.register(os.environ)

def other():
    threading.Event().wait()

threading.Thread(target=other, daemon=True).start()

def stuck():
    Path(sys.argv[1]).touch()
    {what}

stuck()
"""
WHAT = {
    "outside the interpreter's lock": "os.read(os.pipe()[0], 1)",
    "inside it": "import itertools; sum(itertools.repeat(1, 10**13))",
}


@pytest.fixture
def page():
    page = HeartbeatPage.create()
    yield page
    page.close()


@pytest.fixture
def stuck(page, tmp_path):
    def start(what):
        ready = tmp_path / "ready"
        command = [sys.executable, "-c", STANDS.format(what=what), str(ready)]
        process = Popen(command, env=os.environ | page.environ)
        until(ready.exists, "the process")
        return process.pid

    return start


def gathered(page, pids):
    return returned(stacks.gather(page.fd, pids))


@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_the_stack_of_the_main_thread_is_gathered(page, stuck, what):
    """In neither case would a Python signal handler run."""
    pid = stuck(what)
    text = gathered(page, [pid])[pid]
    assert "in other" not in text  # no other threads, since the process continues: see below
    frames = stacks.main_frames(text)
    assert frames[0].endswith(" in stuck")
    assert stacks.own_frame(frames) == frames[0]


def test_each_process_has_its_own_and_nothing_is_left_of_an_earlier_time(page, stuck, tmp_path):
    first = stuck(WHAT["inside it"])
    (tmp_path / "ready").unlink()
    second = stuck(WHAT["outside the interpreter's lock"])
    for _ in range(2):
        found = gathered(page, [first, second])
        assert [found[pid].count("in stuck") for pid in (first, second)] == [1, 1]


def test_a_process_without_a_handler_is_not_killed_by_the_signal(page):
    """The signal's default action would end the process."""
    process = Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    process.stdout.read(1)
    assert gathered(page, [process.pid]) == {process.pid: ""}
    assert process.poll() is None


OWN = """
import signal, sys, threading
signal.signal(signal.SIGRTMAX - 3, lambda *_: print("asked", flush=True))
print(1, flush=True)
input()
"""


def test_a_programs_own_handler_is_left_alone(page):
    """The handler can have any meaning; and after an exec, forge's own is no longer installed."""
    process = Popen([sys.executable, "-c", OWN], stdin=-1, stdout=-1, env=os.environ | page.environ)
    process.stdout.readline()
    assert gathered(page, [process.pid]) == {process.pid: ""}
    assert process.communicate(b"\n")[0] == b""


BEARS = """
import os, sys, threading
from pathlib import Path
from forge.process import stacks
stacks.register(os.environ)

def rest():
    while True:
        thread = threading.Thread(target=sum, args=([1],))
        thread.start()
        thread.join()

threading.Thread(target=rest, daemon=True).start()
Path(sys.argv[1]).touch()
os.read(os.pipe()[0], 1)
"""


def test_a_process_that_may_live_on_is_not_crashed_by_its_stacks(page, tmp_path):
    """With threads that come and go, a dump of all threads causes SIGSEGV after a few times."""
    ready = tmp_path / "ready"
    process = Popen([sys.executable, "-c", BEARS, str(ready)], env=os.environ | page.environ)
    until(ready.exists, "the process")
    for _ in range(25):
        gathered(page, [process.pid])
    assert process.poll() is None


def test_a_process_that_does_not_react_is_not_waited_for_long(page, stuck):
    """A stopped process handles no signal, and neither does a process in state D."""
    pid = stuck(WHAT["inside it"])
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "state T" in stacks.in_kernel(pid), "stopped process")
    assert gathered(page, [pid]) == {pid: ""}


MARKS = """
import os, sys
from forge.process.progress import HeartbeatWriter
marks = HeartbeatWriter.open(os.environ)
print(1, flush=True)
input()
"""


def test_a_process_that_only_marks_is_not_killed_by_the_signal(page):
    """The process has opened the heartbeat page, but its handler is not yet installed."""
    process = Popen(
        [sys.executable, "-c", MARKS], stdin=-1, stdout=-1, env=os.environ | page.environ
    )
    process.stdout.readline()
    assert gathered(page, [process.pid]) == {process.pid: ""}
    assert process.poll() is None


def test_once_the_time_for_all_is_over_nobody_is_waited_for(page, stuck, monkeypatch):
    """A loader can have many workers."""
    pid = stuck(WHAT["inside it"])
    monkeypatch.setattr(stacks, "_ALL_S", 0.0)
    with pytest.raises(StopIteration):
        next(stacks.gather(page.fd, [pid]))


def test_what_still_grows_is_waited_for(tmp_path):
    """faulthandler writes a stack line by line."""
    with open(tmp_path / "file", "wb") as file:

        def written(work):
            for size in (0, 7, 12, 16, 16, 20):
                next(work)
                os.ftruncate(file.fileno(), size)

        with pytest.raises(StopIteration) as end:
            written(stacks.settled(file.fileno(), 7, 60.0, 60.0))
        assert end.value.value == 9
        assert returned(stacks.settled(file.fileno(), 16, 0.05, 60.0)) == 0


def test_one_handler_is_enough(page, monkeypatch):
    """Each Run registers the handler, and a worker inherits that of its parent."""
    made = []
    monkeypatch.setattr(faulthandler, "register", lambda *_, **more: made.append(more["file"]))
    monkeypatch.setattr(stacks, "_is_registered", False)
    for _ in range(2):
        stacks.register(page.environ)
    assert len(made) == 1
    os.close(made[0])


def test_where_its_threads_are_in_the_kernel_is_shown(page, stuck):
    pid = stuck(WHAT["outside the interpreter's lock"])
    until(lambda: "state R" not in stacks.in_kernel(pid), "process that stands")
    lines = stacks.in_kernel(pid).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"  thread {pid} python")
    assert "state S" in lines[0]
    assert stacks.in_kernel(2**22 + 1) == ""


def test_a_thread_that_ends_meanwhile_is_left_out(monkeypatch):
    own = str(os.getpid())
    monkeypatch.setattr(os, "listdir", lambda _: [str(2**22 + 1), own])
    (line,) = stacks.in_kernel(os.getpid()).splitlines()
    assert line.startswith(f"  thread {own} ")


DUMP = """Thread 0x00007f6 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f7 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/someone/in, line 3/train.py", line 21 in stuck
  File "/home/someone/train.py", line 44 in main
"""


def test_the_line_is_the_users_own():
    """The frame inside of `threading` would not help the user."""
    frames = stacks.main_frames(DUMP)
    assert frames[0] == "/usr/lib/python3.11/threading.py:327 in wait"
    assert len(frames) == 3
    assert stacks.own_frame(frames) == "/home/someone/in, line 3/train.py:21 in stuck"
    assert stacks.own_frame(frames[:1]) == frames[0]
    assert stacks.own_frame([]) == ""


def test_where_the_main_thread_is_not_shown_nobody_else_is_blamed():
    """faulthandler stops after a hundred threads, and writes the main thread last."""
    assert stacks.main_frames(DUMP.partition("Current")[0] + "...\n") == []


def test_without_a_supervisor_nothing_is_registered(monkeypatch):
    """A script that is started by hand keeps the signal as it was."""
    before = signal.getsignal(stacks.SIGNAL)
    stacks.register({})
    stacks.register({"FORGE_PROGRESS": "/proc/1/fd/999"})
    assert signal.getsignal(stacks.SIGNAL) == before
