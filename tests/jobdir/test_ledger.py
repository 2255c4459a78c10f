"""The history of a job after any end: torn lines, kills, rollbacks, attempts, full disks."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from forge.jobdir import ledger, ledger_writer
from forge.jobdir.ledger_writer import Ledger


@pytest.fixture
def attempt(tmp_path):
    opened = []

    def open_one():
        opened.append(Ledger(tmp_path))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def log(writer, step, **values):
    writer.write("metrics", step=step, values=values)


def test_attempts_merge_into_what_an_undisturbed_run_would_have_logged(attempt, tmp_path):
    """The values of a repeated step replace those that it logged first."""
    one = attempt()
    one.write("start", step=0)
    for step in range(5):
        log(one, step, loss=step)
    two = attempt()
    two.write("start", step=3)
    log(two, 3, loss=30)
    history = ledger.read(tmp_path)
    assert history.metrics == {0: {"loss": 0}, 1: {"loss": 1}, 2: {"loss": 2}, 3: {"loss": 30}}
    assert [(a.number, a.start_step) for a in history.attempts] == [(1, 0), (2, 3)]


def test_each_rank_has_a_ledger_of_its_own(attempt, tmp_path, monkeypatch):
    """Otherwise two ranks of one attempt would be two attempts, and would log every step twice."""
    attempt().progress(7)
    monkeypatch.setenv("FORGE_RANK", "1")
    one = attempt()
    one.progress(3)
    log(one, 0, loss=1)
    assert (one.attempt, ledger.read_progress(tmp_path).step) == (1, 3)
    assert ledger.read(tmp_path).metrics == {0: {"loss": 1}}
    monkeypatch.delenv("FORGE_RANK")
    assert ledger.read_progress(tmp_path).step == 7
    assert ledger.read(tmp_path).metrics == {}


def test_a_rollback_forgets_the_steps_it_undoes(attempt, tmp_path):
    """The undone steps are not part of the run in the end."""
    one = attempt()
    one.write("start", step=0)
    for step in range(5):
        log(one, step, loss=step)
    one.write("rollback", step=2)
    log(one, 2, loss=20)
    assert ledger.read(tmp_path).metrics == {0: {"loss": 0}, 1: {"loss": 1}, 2: {"loss": 20}}


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_torn_last_line_costs_that_line_only(lost, attempt, tmp_path):
    """A power cut in the middle of a write can leave such a line."""
    one = attempt()
    log(one, 0, loss=1.0)
    log(one, 1, loss=2.0)
    (path,) = (tmp_path / ".forge" / "ledger").iterdir()
    os.truncate(path, path.stat().st_size - lost)
    metrics = ledger.read(tmp_path).metrics
    assert metrics in ({0: {"loss": 1.0}}, {0: {"loss": 1.0}, 1: {"loss": 2.0}})
    assert lost == 1 or 1 not in metrics


@pytest.mark.parametrize("junk", [b"\0" * 50, b"\xff\xfe", b"[]", b"3", b'{"step": 1}', b"null"])
def test_lines_that_are_no_events_are_left_out(junk, attempt, tmp_path):
    """On some file systems unwritten parts of a file become zeros."""
    one = attempt()
    log(one, 0, loss=1.0)
    (path,) = (tmp_path / ".forge" / "ledger").iterdir()
    with path.open("ab") as file:
        file.write(junk + b"\n")
    log(one, 1, loss=2.0)
    assert list(ledger.read(tmp_path).metrics) == [0, 1]


def test_values_that_json_lacks_are_kept(attempt, tmp_path):
    """Users look for a NaN loss in the log."""
    log(attempt(), 0, loss=float("nan"), peak=float("inf"), tiny=5e-324)
    found = ledger.read(tmp_path).metrics[0]
    assert str(found["loss"]) == "nan"
    assert (found["peak"], found["tiny"]) == (float("inf"), 5e-324)


KILLED = """
import os, signal, sys
from pathlib import Path
from forge.jobdir.ledger_writer import Ledger
one = Ledger(Path(sys.argv[1]))
for step in range(1000):
    one.write("metrics", step=step, values={"loss": 1.0})
    one.progress(step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_progress_and_lines_survive_sigkill(attempt, tmp_path):
    """The process buffers nothing, so these files show how much a kill has cost."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    assert ledger.read_progress(tmp_path)[:2] == (1, 999)
    assert len(ledger.read(tmp_path).metrics) == 1000
    assert attempt().previous_step == 999


@pytest.mark.parametrize("content", [b"", b"short", bytes(32), b"x" * 32, b"y" * 99])
def test_a_progress_file_that_is_none_is_no_progress(content, attempt, tmp_path):
    """A crash of the machine can leave any bytes; the next attempt overwrites them."""
    (tmp_path / ".forge").mkdir()
    (tmp_path / ".forge" / "progress").write_bytes(content)
    assert ledger.read_progress(tmp_path) is None
    one = attempt()
    assert one.previous_step is None
    one.progress(7)
    assert ledger.read_progress(tmp_path)[:2] == (1, 7)


def test_the_progress_file_owns_its_bytes_on_disk(attempt, tmp_path):
    """If the file had a hole, the first step on a full disk would end with SIGBUS."""
    attempt()
    assert (tmp_path / ".forge" / "progress").stat().st_blocks > 0


def test_a_full_disk_loses_no_line(attempt, tmp_path, monkeypatch):
    """Lines wait until the disk has space, and half-written lines are completed."""
    one = attempt()
    write, left = os.write, [3]

    def failing(fd, content):
        if fd != one._fd:
            return write(fd, content)
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content[:7])  # then only a few bytes at a time

    monkeypatch.setattr(os, "write", failing)
    for step in range(3):
        log(one, step, loss=step)
    left[0] = 1
    with pytest.raises(OSError, match="No space left"):
        one.sync()
    one.sync()
    assert list(ledger.read(tmp_path).metrics) == [0, 1, 2]


def test_lines_of_two_threads_are_neither_lost_nor_doubled(attempt, tmp_path):
    """A save in the background writes its events while the loop logs."""
    one = attempt()
    barrier = threading.Barrier(3)

    def write(name):
        barrier.wait()
        for i in range(2000):
            one.write(name, i=i)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = ledger.read(tmp_path).attempts[0].events
    for name in "abc":
        assert [e["i"] for e in events if e["kind"] == name] == list(range(2000))


def test_a_number_that_another_attempt_took_is_skipped(attempt, tmp_path, monkeypatch):
    """A leftover process and its successor can start in the same moment."""
    attempt()
    monkeypatch.setattr(ledger_writer, "_numbers", lambda folder: [])
    assert attempt().attempt == 2


def test_a_job_without_a_ledger_has_an_empty_history(tmp_path):
    """The job has not started yet."""
    (tmp_path / ".forge").mkdir()
    assert ledger.read(tmp_path).attempts == []
    assert ledger.read_progress(tmp_path) is None


def test_a_directory_of_no_job_is_an_error_that_names_it(tmp_path):
    """An empty history would look like a job that logged nothing."""
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path / 'typo'}: expected the directory of"):
        ledger.read(tmp_path / "typo")
