"""All ranks notice at once that a rank is gone, wherever they wait; a slow rank is not gone."""

import contextlib
import os
import signal
import socket

import pytest
from harness import until
from ranked import RankedJob

from forge.group.liveness import LivenessMonitor
from forge.group.secret import Secret

CODES = {"killed": -signal.SIGKILL, "exits": 0, "leaves": 1}


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("how", CODES)
def test_a_rank_that_ends_alone_is_lost_for_all(how, who, tmp_path):
    """Otherwise the others would wait for half an hour: in a save, or for an evaluation to end."""
    job = RankedJob(tmp_path, 3, "dying.py", who=who, how=how, where="gather")
    codes = job.run()
    expected = [70] * 3
    expected[who] = CODES[how]
    assert codes == expected, job.output
    for rank in {0, 1, 2} - {who}:
        said = [one for one in job.printed[rank] if "is gone" in one]
        assert f"Rank {who}" in said[0]


def test_one_that_trains_on_sees_it_at_its_next_boundary(tmp_path):
    """A rank can be in a step without a collective."""
    job = RankedJob(tmp_path, 2, "dying.py", who=1, how="killed", where="agreed")
    assert job.run() == [70, -signal.SIGKILL], job.output
    assert "Rank 1 of 2 is gone" in job.printed[0]


def test_a_child_that_outlives_it_does_not_hide_its_end(tmp_path):
    """A forked DataLoader worker inherits the open sockets of its rank."""
    job = RankedJob(tmp_path, 2, "dying.py", who=1, how="killed", where="gather", has_child=True)
    try:
        assert job.run() == [70, -signal.SIGKILL], job.output
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("then", ["SIGCONT", "SIGKILL"])
def test_one_that_is_stopped_is_waited_for_while_it_lives(then, tmp_path):
    """A suspended rank can continue; then the ranks agree on what was proposed in the meantime."""
    job = RankedJob(tmp_path, 3, "dying.py", who=2, then=then, where="agreed")
    expected = [0, 0, 0] if then == "SIGCONT" else [70, 70, -signal.SIGKILL]
    assert job.run() == expected, job.output


def test_a_stranger_at_the_port_is_no_rank():
    """Port scanners connect, and the end of their connection must not raise an alarm."""
    lost = [[], []]
    first, second = (LivenessMonitor(2, Secret("a", b"key").code_of, one.append) for one in lost)
    port = first.listen(is_local=True)
    for hello in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(36), bytes(35) + b"\1"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""  # rejected
    second.join(1, "127.0.0.1", port, 30)
    second.leave_alone(linger_s=0)
    until(lambda: lost[0] == [1], "end of the other")  # possibly before it was admitted
    first.leave_alone(linger_s=30)
    first.close()
    second.close()


def test_the_others_hear_who_is_gone_before_rank_0_acts():
    """Rank 0 can exit at once, and the others would name it instead."""
    heard = []

    def rank_0_acts(number):
        if number == 2:
            until(lambda: 2 in heard, "news on rank 1")

    secret = Secret("a", b"key").code_of
    first = LivenessMonitor(3, secret, rank_0_acts)
    others = [LivenessMonitor(3, secret, on_lost) for on_lost in (heard.append, int)]
    port = first.listen(is_local=True)
    for rank, one in enumerate(others, 1):
        one.join(rank, "127.0.0.1", port, 30)
    until(lambda: len(first._connections) == 2, "both ranks")
    others[1].leave_alone(linger_s=0)
    until(lambda: heard == [2], "the news")
    for one in (first, *others):
        one.close()
