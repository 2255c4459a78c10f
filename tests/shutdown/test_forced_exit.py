"""`ShutdownHandler` in processes of their own: the forced exit, Ctrl+C, forked children."""

import os
import signal
import subprocess
import sys

import pytest
from harness import full_pipe
from started import Popen
from test_shutdown_handler import send

from forge.shutdown.signal_handler import ShutdownHandler


def run_script(code, *arguments, **options):
    """A small process, in a session of its own."""
    return Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.STDOUT),
        text=True,
        start_new_session=True,
        **options,
    )


def finish(process):
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


ONE_CTRL_C = """
import os, signal
from forge.shutdown.signal_handler import ShutdownHandler
handler = ShutdownHandler(0)
handler.register()
os.kill(os.getpid(), signal.SIGINT)
while handler._decisive is None:
    pass
signal.set_wakeup_fd(-1)  # as an event loop does when it ends
print("stops", handler.should_shutdown(), flush=True)
print("saved")
"""


def test_one_ctrl_c_is_one_though_somebody_took_the_descriptor():
    """Counted twice it would end the process before the save."""
    code, output = finish(run_script(ONE_CTRL_C))
    assert (code, output) == (0, "stops True\nsaved\n")


# -- the forced exit ------------------------------------------------------------------------------

HANGS = """
import os, signal, sys, time
from forge.shutdown.signal_handler import ShutdownHandler
handler = ShutdownHandler(timeout_sec=float(sys.argv[1]))
handler.register()
def hang_here():
    os.kill(os.getpid(), signal.SIGTERM)
    {hang}
hang_here()
"""
SLEEP = HANGS.format(hang="time.sleep(600)")
# Holds the GIL's owner in one C call that never returns to bytecode, signal or not.
LOCK = HANGS.format(hang="import _thread; l = _thread.allocate_lock(); l.acquire(); l.acquire()")
# Between signal and finish its clock stands still, however long it waits for a core.
FINISHES = (
    "import time; real, now = time.monotonic, time.monotonic(); time.monotonic = lambda: now"
    + HANGS.format(hang="handler.finish(); time.monotonic = real; print('finished', flush=True)")
)


@pytest.mark.parametrize("code", [SLEEP, LOCK], ids=["sleep", "lock"])
def test_a_hanging_stop_is_ended_with_70_and_every_threads_stack(tmp_path, code):
    """Whoever finds the dead job wants to know where it hung."""
    process = run_script(code, "0.2", cwd=tmp_path)
    code, output = finish(process)
    assert code == 70, output
    (stacks,) = tmp_path.glob("stacks_*.txt")
    assert stacks.name == f"stacks_{process.pid}.txt"
    assert "in hang_here" in stacks.read_text()
    assert "Stopping took longer than 0.2 s" in output
    assert str(stacks) in output


def test_the_forced_exit_waits_a_while_for_its_last_words(tmp_path):
    """Whoever logs slowly, and a busy machine, hear them too."""
    slow = (
        "import logging, sys, time\nfrom forge import messages\n"
        "class Slow(logging.StreamHandler):\n"
        "    def emit(self, record):\n"
        "        time.sleep(2 * messages.PATIENCE_S)\n        super().emit(record)\n"
        "logging.getLogger('forge').addHandler(Slow(sys.stderr))\n"
    )
    code, output = finish(run_script(slow + SLEEP, "0.2", cwd=tmp_path))
    assert (code, "forced exit with code 70" in output) == (70, True), output


def test_the_forced_exit_ends_the_children_too():
    code = SLEEP.replace(
        "handler.register()",
        "handler.register()\n"
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(600)']); print(child.pid, flush=True)",
    )
    # The pipe ends when nobody holds it any more, the child included.
    code, _ = finish(run_script(code, "0.2", cwd="/tmp"))
    assert code == 70


def test_the_forced_exit_comes_though_nobody_reads_stderr(tmp_path):
    """A full pipe blocks whoever writes to it; the scheduler's patience does not last forever."""
    reader, writer = full_pipe()
    process = run_script(SLEEP, "0.2", cwd=tmp_path, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        assert process.wait(120) == 70
    finally:
        os.close(reader)
        process.kill()
    assert list(tmp_path.glob("stacks_*.txt"))


def test_the_forced_exit_comes_though_the_stacks_cannot_be_written(tmp_path):
    """A full or dead disk is a reason to hang, and must not be one to stay."""
    code = SLEEP.replace("float(sys.argv[1])", "0.2, stacks_dir='/proc/nowhere'")
    code, output = finish(run_script(code, cwd=tmp_path))
    assert code == 70
    assert "could not be written to /proc/nowhere/" in output


def test_finish_cancels_the_forced_exit():
    """The process runs for longer than the timeout, and ends as it likes."""
    code = FINISHES + "time.sleep(0.5)  # longer than the timeout\nsys.exit(3)\n"
    code, output = finish(run_script(code, "0.2"))
    assert (code, output) == (3, "finished\n")


def test_zero_never_forces(handler):
    send(signal.SIGTERM)
    assert handler.should_shutdown()
    assert handler.deadline is None


def test_the_first_signal_sets_the_deadline_and_the_next_do_not_move_it():
    """Else a scheduler that repeats itself would put the exit off forever."""
    handler = ShutdownHandler(timeout_sec=3600)
    handler.register()
    try:
        assert handler.deadline is None
        send(signal.SIGTERM)
        assert handler.should_shutdown()
        first = handler.deadline
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert handler.should_shutdown()
        assert handler.deadline == first is not None
    finally:
        handler.finish()
    assert handler.deadline is None


def test_two_ctrl_c_end_the_process_at_once():
    """Whoever presses it again wants out, whatever the process is doing."""
    code = SLEEP.replace("signal.SIGTERM", "signal.SIGINT").replace(
        "    time.sleep",
        "    while handler.signal_received is None: pass\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep",
    )
    assert finish(run_script(code, "600")) == (130, "")


# -- forked children ------------------------------------------------------------------------------

FORKS = """
import os, signal, sys, time
from forge.shutdown.signal_handler import ShutdownHandler
handler = ShutdownHandler(0)
handler.register()
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"r")
    while True:
        signal.pause()
os.read(ready, 1)
"""


def test_a_sigterm_for_a_forked_child_alone_ends_it_and_not_the_parent():
    """`Process.terminate()` has to work as ever."""
    code = FORKS + (
        "os.kill(child, signal.SIGTERM)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status), handler.should_shutdown())\n"
    )
    assert finish(run_script(code)) == (0, "-15 False\n")


def test_a_signal_for_the_whole_session_does_not_end_a_forked_child():
    """Slurm signals every process of a step; the helper is needed until the save is done."""
    code = FORKS + (
        "os.killpg(0, signal.SIGTERM)\n"
        "while not handler.should_shutdown(): pass\n"
        "time.sleep(0.6)  # longer than a child waits to hear of its parent\n"
        "print(os.waitpid(child, os.WNOHANG))\n"
        "os.kill(child, signal.SIGKILL)\n"
        "os.waitpid(child, 0)\n"
    )
    assert finish(run_script(code)) == (0, "(0, 0)\n")


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGINT"])
def test_other_signals_for_a_forked_child_do_not_stop_the_parent(name):
    """The child has the parent's pipe; what arrives there would be the parent's stop."""
    code = FORKS + (
        f"os.kill(child, signal.{name})\n"
        "os.kill(child, signal.SIGKILL)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status), handler.should_shutdown())\n"
    )
    assert finish(run_script(code)) == (0, "-9 False\n")


EATEN_WAKE_UP = """
import os, signal, threading
from forge.shutdown.signal_handler import ShutdownHandler
handler = ShutdownHandler(0.2)
handler.register()
receive, main = handler._drain, threading.main_thread()
handler._drain = lambda: receive() if threading.current_thread() is main else None
os.kill(os.getpid(), signal.SIGTERM)
while not handler.shutdown_requested:
    pass
handler._drain = receive
threading.Event().wait()
"""


def test_a_deadline_holds_though_the_main_thread_has_read_what_was_to_wake_the_watcher(tmp_path):
    """A stop that hangs then would hang forever: seen with a busy machine and a dead disk."""
    code, output = finish(run_script(EATEN_WAKE_UP, cwd=tmp_path))
    assert code == 70, output
