"""`ShutdownHandler` by itself: the API's minimum, what it leaves behind, and its neighbours."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness import full_pipe

from forge.resilience import ShutdownHandler

ROOT = Path(__file__).parents[2]
STOPPING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]


@pytest.fixture
def handler():
    """Registered, without a forced exit, and gone after the test."""
    one = ShutdownHandler(timeout_sec=0)
    one.register()
    yield one
    one.unregister()


def send(number):
    os.kill(os.getpid(), number)


def run_script(code, *arguments, **options):
    """A small process, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.STDOUT),
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        **options,
    )


def finish(process):
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


# -- the flag -------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_api():
    handler = ShutdownHandler()
    assert handler.timeout_sec == 600.0
    assert handler.signal_received is None
    assert handler.shutdown_requested is False
    assert handler.should_shutdown() is False
    assert handler.exit_code == 0


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_sets_the_flag(handler, number):
    assert handler.should_shutdown() is False
    send(number)
    assert handler.should_shutdown() is True
    assert handler.shutdown_requested is True
    assert handler.signal_received is number
    assert isinstance(handler.signal_received, signal.Signals)


@pytest.mark.parametrize(
    ("number", "code", "is_requeue"),
    [
        (signal.SIGTERM, 143, False),
        (signal.SIGINT, 130, False),
        (signal.SIGUSR1, 75, True),
        (signal.SIGUSR2, 75, True),
    ],
)
def test_the_signal_decides_the_exit_code(handler, number, code, is_requeue):
    send(number)
    assert (handler.exit_code, handler.is_requeue) == (code, is_requeue)


def test_repeated_signals_change_nothing(handler):
    """Slurm sends SIGTERM twice, and impatient people send more."""
    for _ in range(200):
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
    assert handler.signal_received is signal.SIGTERM
    assert handler.should_shutdown() is True


def test_ctrl_c_after_another_signal_decides(handler):
    """A person at the keyboard wants no requeue."""
    send(signal.SIGUSR1)
    assert handler.exit_code == 75
    send(signal.SIGINT)
    assert handler.exit_code == 130


def test_a_save_is_asked_for_once_and_an_ignored_signal_is_ignored():
    handler = ShutdownHandler(0, {"SIGUSR1": "save", "hup": "ignore"})
    handler.register()
    try:
        send(signal.SIGHUP)
        send(signal.SIGUSR1)
        assert handler.take_save_request() is True
        assert handler.take_save_request() is False
        assert handler.should_shutdown() is False
    finally:
        handler.unregister()


def test_other_threads_see_the_flag(handler):
    """A prefetching thread may ask as well."""
    send(signal.SIGTERM)
    found = []
    thread = threading.Thread(target=lambda: found.append(handler.should_shutdown()))
    thread.start()
    thread.join()
    assert found == [True]


# -- registering ----------------------------------------------------------------------------------


def own_handler(number, frame):
    pass


@pytest.mark.parametrize("original", [signal.SIG_DFL, signal.SIG_IGN, own_handler])
@pytest.mark.parametrize("end", ["unregister", "finish"])
def test_the_previous_handlers_are_restored(original, end):
    """Also after registering twice: the second time finds our own handler, not an original."""
    before = {number: signal.signal(number, original) for number in STOPPING}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        handler = ShutdownHandler(0)
        handler.register()
        handler.register()
        assert all(signal.getsignal(number) is not original for number in STOPPING)
        getattr(handler, end)()
        getattr(handler, end)()
        assert [signal.getsignal(number) for number in STOPPING] == [original] * len(STOPPING)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, one in before.items():
            signal.signal(number, one)


def test_a_handler_can_be_registered_again():
    handler = ShutdownHandler(0)
    for _ in range(3):
        handler.register()
        handler.unregister()
    handler.register()
    try:
        send(signal.SIGTERM)
        assert handler.should_shutdown()
    finally:
        handler.unregister()


def test_registering_leaves_no_thread_and_no_descriptor_behind():
    """A test suite, or a notebook, does it a thousand times."""
    ShutdownHandler(0).register  # noqa: B018 - whatever is loaded lazily is loaded now
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))
    for _ in range(20):
        handler = ShutdownHandler(0)
        handler.register()
        handler.unregister()
    del handler
    assert threading.active_count() == threads
    assert len(os.listdir("/dev/fd")) <= descriptors + 1


def test_registering_outside_the_main_thread_says_where_to():
    """Python's own message speaks of the main interpreter."""
    caught = []

    def register():
        try:
            ShutdownHandler(0).register()
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=register, name="loader")
    thread.start()
    thread.join()
    assert "'loader'" in caught[0]
    assert "main thread" in caught[0]


def test_a_second_handler_above_the_first_gives_way_to_it():
    first, second = ShutdownHandler(0), ShutdownHandler(0)
    first.register()
    try:
        second.register()
        send(signal.SIGUSR1)
        assert second.signal_received is signal.SIGUSR1
        second.unregister()
        send(signal.SIGTERM)
        assert first.should_shutdown()
        assert second.signal_received is signal.SIGUSR1
    finally:
        second.unregister()
        first.unregister()


def test_an_unknown_signal_is_refused():
    with pytest.raises(KeyError):
        ShutdownHandler(0, {"TREM": "stop"})


# -- others that want the wake-up descriptor ------------------------------------------------------


@pytest.fixture
def pair():
    """Somebody else's wake-up descriptor: (what they read, what they set)."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = signal.set_wakeup_fd(-1)
    yield reader, writer
    signal.set_wakeup_fd(before)
    reader.close()
    writer.close()


def test_the_descriptor_that_was_there_hears_every_signal_and_comes_back(pair):
    """An event loop that was there first goes on working."""
    reader, writer = pair
    signal.set_wakeup_fd(writer.fileno())
    handler = ShutdownHandler(0)
    handler.register()
    try:
        send(signal.SIGTERM)
        assert handler.should_shutdown()
        assert select.select([reader], [], [], 30)[0]
        assert signal.SIGTERM in reader.recv(64)
    finally:
        handler.unregister()
    assert signal.set_wakeup_fd(-1) == writer.fileno()


def test_a_signal_is_heard_though_somebody_took_the_descriptor(pair, handler):
    reader, writer = pair
    signal.set_wakeup_fd(writer.fileno())
    send(signal.SIGTERM)
    assert handler.should_shutdown()
    assert select.select([reader], [], [], 30)[0], "and the other one hears it as well"


def test_asyncio_with_handlers_of_its_own_works_inside(handler):
    """Data is fetched by an event loop in many a training script."""
    heard = []

    async def fetch():
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def hear():
            heard.append("hup")
            done.set_result(None)

        loop.add_signal_handler(signal.SIGHUP, hear)
        send(signal.SIGHUP)
        await asyncio.wait_for(done, 60)
        send(signal.SIGTERM)

    on_hup = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.run(fetch())
        assert heard == ["hup"]
        assert handler.signal_received is signal.SIGTERM
        send(signal.SIGUSR1)
        assert handler.should_shutdown()
    finally:
        signal.signal(signal.SIGHUP, on_hup)


@pytest.mark.parametrize("taken", [False, True])
def test_unregistering_survives_a_descriptor_that_its_owner_closed(taken, pair):
    """An event loop that was there when we registered may be gone by now."""
    _, writer = pair
    signal.set_wakeup_fd(writer.fileno())
    threads = threading.active_count()
    handler = ShutdownHandler(0)
    handler.register()
    writer.close()
    if taken:
        signal.set_wakeup_fd(-1)
    handler.unregister()
    assert threading.active_count() == threads


def test_unregistering_leaves_a_descriptor_that_somebody_set_meanwhile(pair):
    """A running event loop must not go deaf because a run ended inside it."""
    _, writer = pair
    handler = ShutdownHandler(0)
    handler.register()
    signal.set_wakeup_fd(writer.fileno())
    handler.unregister()
    assert signal.set_wakeup_fd(-1) == writer.fileno()


ONE_CTRL_C = """
import os, signal
from forge.resilience import ShutdownHandler
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
from forge.resilience import ShutdownHandler
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
FINISHES = HANGS.format(hang="handler.finish(); print('finished', flush=True)")


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
    """A full pipe blocks whoever writes to it; the scheduler's patience does not last for ever."""
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
    """The process goes on for longer than the timeout, and ends as it likes."""
    code = FINISHES.replace("hang_here()\n", "hang_here()\n", 1)
    code += "time.sleep(0.5)  # longer than the timeout\nsys.exit(3)\n"
    code, output = finish(run_script(code, "0.2"))
    assert (code, output) == (3, "finished\n")


def test_zero_never_forces(handler):
    send(signal.SIGTERM)
    assert handler.should_shutdown()
    assert handler.deadline is None


def test_the_first_signal_sets_the_deadline_and_the_next_do_not_move_it():
    """Else a scheduler that repeats itself would put the exit off for ever."""
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
from forge.resilience import ShutdownHandler
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
