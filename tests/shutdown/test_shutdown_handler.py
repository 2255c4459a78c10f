"""`ShutdownHandler` by itself: the API's minimum, what it leaves behind, and its neighbours."""

import asyncio
import os
import select
import signal
import socket
import threading

import pytest
from harness import until

from forge.shutdown import signal_handler
from forge.shutdown.signal_handler import ShutdownHandler

STOPPING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP]
LEFT_IGNORED = [signal.SIGINT, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _hangups_are_not_ignored():
    """Tests that run under nohup: what was ignored before stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number):
    os.kill(os.getpid(), number)


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
        (signal.SIGHUP, 129, False),
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


@pytest.mark.parametrize(
    ("number", "notice_s", "variables"),
    [
        ("INT", 0.0, {}),
        ("INT", 0.0, {"LOCAL_RANK": "0", "RANK": "8"}),
        ("INT", 0.0, {"LOCAL_RANK": "1", "RANK": "9"}),
        ("INT", 0.0, {"SLURM_LOCALID": "1"}),
        ("INT", 60.0, {}),
        ("TERM", 0.0, {}),
    ],
)
def test_ctrl_c_in_a_long_step_says_what_happens(number, notice_s, variables, handler, monkeypatch):
    """Without a word in the minute that a step takes, people press it again, and lose the save.

    Of the ranks at one terminal, the first says it.
    """
    said = []
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    is_said = number == "INT" and notice_s == 0 and "1" not in variables.values()
    monkeypatch.setattr(signal_handler, "_NOTICE_S", notice_s)
    monkeypatch.setattr(signal_handler.messages, "say", said.append)
    send(signal.Signals[f"SIG{number}"])
    until(lambda: handler.shutdown_requested, "the signal")
    if is_said:
        until(lambda: said, "the notice")
        assert "Pressing it again exits immediately, without a save" in said[0]
    handler.unregister()  # ends the thread that would say it
    assert len(said) == is_said


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
        left = LEFT_IGNORED if original is signal.SIG_IGN else []
        assert [n for n in STOPPING if signal.getsignal(n) is original] == left
        getattr(handler, end)()
        getattr(handler, end)()
        assert [signal.getsignal(number) for number in STOPPING] == [original] * len(STOPPING)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, one in before.items():
            signal.signal(number, one)


def test_an_ignored_hangup_is_heard_where_the_policy_asks_for_more_than_a_stop():
    """A checkpoint on demand under nohup: somebody has asked for it by name."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler = ShutdownHandler(0, {"HUP": "save"})
    handler.register()
    try:
        send(signal.SIGHUP)
        assert handler.take_save_request()
    finally:
        handler.unregister()


def test_a_forked_child_ignores_what_its_parent_ignores():
    """A program that the child starts under nohup would otherwise be ended by the hangup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler = ShutdownHandler(0)
    handler.register()
    try:
        if (pid := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        handler.unregister()


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
    """An event loop that was there first keeps working."""
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


def test_a_descriptor_that_somebody_took_is_taken_back(pair, handler):
    """A main thread that hangs in C later would have no deadline else."""
    _, writer = pair
    signal.set_wakeup_fd(writer.fileno())

    def is_back():
        handler.should_shutdown()
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd not in (-1, writer.fileno())

    until(is_back, "descriptor of ours")
    assert is_back()


def test_a_signal_is_heard_though_somebody_has_replaced_its_handler(handler):
    """A library that sets one of its own, and forgets ours: the C half is heard all the same."""
    before = signal.signal(signal.SIGUSR1, own_handler)
    try:
        send(signal.SIGUSR1)
        until(handler.should_shutdown, "stop")
        assert handler.signal_received is signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


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
