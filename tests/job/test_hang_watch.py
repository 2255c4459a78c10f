"""The reports of a supervisor on its task's progress."""

import os
import sys
from dataclasses import replace

import pytest
from harness import until
from started import Popen

from forge.job import hang_files, hang_watch
from forge.job.hang_files import HangQuery, QueryPhase
from forge.job.hang_watch import HangWatch
from forge.jobdir.job_files import ATTEMPT, RANK, RANKS
from forge.process import processes, stacks
from forge.process.progress import HeartbeatPage, HeartbeatWriter, Phase

LIMIT_S = 10.0


QUERY = HangQuery(attempt=1, rank=1, time=5.0)


class Watched:
    """A supervisor's hang watch; the test process acts as the task and as the wrapper."""

    def __init__(self, folder, rank=0, ranks=1):
        self.forge = folder / ".forge"
        hang_files.clear(self.forge)
        environment = {ATTEMPT: "1", RANK: str(rank), RANKS: str(ranks)}
        self.watch = HangWatch(self.forge, environment)
        self.marks = HeartbeatWriter.open(self.watch.environ)
        self.rank = rank

    def pass_s(self, seconds, *, is_stopping=False):
        """Let so many seconds pass, in ticks of half a second."""
        return [self.watch.tick(0.5, is_stopping=is_stopping) for _ in range(int(2 * seconds))][-1]

    @property
    def expired(self):
        """The report written without a query; None if there is no report."""
        return next(iter(hang_files.read_reports(self.forge, 1, [self.rank])), None)

    def ask(self, query=QUERY, **changes):
        hang_files.write_query(self.forge, replace(query, **changes))

    def answer(self):
        """The report that answers the present query; None if there is no report yet."""
        query = hang_files.read_query(self.forge, 1)
        return next(iter(hang_files.read_reports(self.forge, 1, [self.rank], query)), None)


@pytest.fixture
def held(monkeypatch):
    """The heartbeat page counts as locked: a process cannot see a lock that it holds itself."""
    monkeypatch.setattr(HeartbeatPage, "is_held", lambda page: True)


@pytest.fixture
def task(tmp_path, held):
    one = Watched(tmp_path)
    one.marks.enter(Phase.step, 7, LIMIT_S)
    one.pass_s(0.5)
    yield one
    one.marks.close()


def test_a_limit_that_has_passed_is_reported(task):
    task.pass_s(LIMIT_S)
    assert task.expired is None
    task.pass_s(2)
    found = task.expired
    assert (found.section, found.step, found.pid) == ("step", 7, os.getpid())
    assert (found.is_expired, found.excuse) == (True, "")
    assert found.waited_s > LIMIT_S


def test_progress_begins_the_count_anew(task):
    """Examples are a save that writes for an hour, and an evaluation of a thousand batches."""
    for _ in range(5):
        task.pass_s(LIMIT_S - 1)
        task.marks.advance()
    assert task.expired is None


def test_without_a_limit_nothing_hangs(task):
    task.marks.enter(Phase.step, 8, 0.0)
    task.pass_s(1000)
    assert task.expired is None


def test_outside_of_a_run_nothing_hangs(task):
    """Main can take any time before and after its forge.Run."""
    task.marks.close()
    task.pass_s(1000)
    assert task.expired is None


def test_time_in_which_the_task_is_stopped_or_asked_to_stop_does_not_count(task, monkeypatch):
    """A task can be stopped by a debugger; a task that was asked to stop has a deadline anyway."""
    task.pass_s(LIMIT_S - 1)
    task.pass_s(1000, is_stopping=True)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "is_suspended", lambda pid: pid == os.getpid())
        task.pass_s(1000)
    assert task.expired is None
    task.pass_s(3)
    assert task.expired is not None


def test_time_in_which_the_supervisor_was_stopped_does_not_count(task):
    """After a suspend of the machine or the job, one long tick does not count as a long wait."""
    for _ in range(3):
        task.watch.tick(1000.0, is_stopping=False)
    assert task.expired is None


def test_a_limit_that_was_no_hang_is_reported_again_after_twice_the_time(task):
    """If the other ranks wait for a slow rank, stacks need not be collected every second."""
    task.pass_s(LIMIT_S + 1)
    task.ask()
    task.pass_s(1)
    waited_s = task.answer().waited_s
    hang_files.clear(task.forge)
    task.pass_s(waited_s - 1)
    assert task.expired is None
    task.pass_s(5)
    assert task.expired.waited_s > 2 * waited_s
    hang_files.clear(task.forge)
    task.marks.advance()
    task.pass_s(LIMIT_S + 2)  # the task has made progress: this is another wait
    assert task.expired.waited_s < waited_s + 1


def test_a_report_that_nobody_has_read_is_written_again(task):
    """The wrapper can delete the report unread, as it clears the folder after another query."""
    task.pass_s(LIMIT_S + 1)
    hang_files.clear(task.forge)
    task.pass_s(12)
    assert task.expired is not None


def test_a_query_is_answered_and_its_end_kills(tmp_path, held):
    """Rank 1 is within its limit; the wrapper decides from all reports, and ends rank 1, too."""
    task = Watched(tmp_path, rank=1, ranks=2)
    task.marks.enter(Phase.save, 3, 3600.0)
    task.ask(rank=0)
    assert not task.pass_s(15)  # the watch reads the query every ten seconds
    found = task.answer()
    assert (found.rank, found.section, found.is_expired) == (1, "save", False)
    assert found.excuse == "has been in `save` for 0 s, within its limit"
    task.ask(rank=0, phase=QueryPhase.end)
    assert task.pass_s(0.5)  # while there is a query, each tick reads it
    task.marks.close()


def test_a_rank_that_makes_progress_looks_for_a_query_once_a_minute(tmp_path, held, monkeypatch):
    """All ranks read from the same disk."""
    looks = []
    monkeypatch.setattr(hang_files, "read_query", lambda *_: looks.append(1))
    task = Watched(tmp_path)
    for step in range(600):
        task.marks.enter(Phase.step, step, 300.0)
        task.pass_s(1)
    assert len(looks) == 10
    task.pass_s(100)
    assert len(looks) == 20  # from now on the limits of other ranks can have passed, too
    task.marks.close()


def marking(watch, end):
    """A process that writes the heartbeat of a step, and then runs the code `end`."""
    process = Popen([sys.executable, "-c", MARKS + end], env=os.environ | watch.environ, stdin=-1)
    until(lambda: watch.page.read().pid == process.pid, "the mark")
    return process


MARKS = """
import os, sys
from forge.process.progress import HeartbeatWriter, Phase
marks = HeartbeatWriter.open(os.environ)
marks.enter(Phase.step, 3, 5.0)
sys.stdin.read(1)
"""


@pytest.mark.parametrize("end", ["os._exit(1)", "os.execlp('sleep', 'sleep', '600')"])
def test_who_was_killed_in_a_step_does_not_hang_there(tmp_path, end):
    """A script can train in several processes in turn, and survive the kill of a process."""
    task = Watched(tmp_path)
    task.marks.close()
    process = marking(task.watch, end)
    task.pass_s(4)
    assert task.watch.waited_s > 3
    process.communicate(b"1") if "exit" in end else process.stdin.close()
    until(lambda: not task.watch.page.is_held(), "the end")
    task.pass_s(100)
    assert task.expired is None
    task.ask()
    task.pass_s(100)
    assert (task.answer().section, task.answer().excuse) == ("outside", "")


def test_a_worker_in_a_debugger_is_no_hang_of_its_task(task, monkeypatch):
    """The main thread waits for a batch of the worker."""
    monkeypatch.setattr(processes, "descendants", lambda root=None: [os.getpid(), 77])
    monkeypatch.setattr(processes, "is_suspended", lambda pid: pid == 77)
    task.pass_s(LIMIT_S + 2)
    assert task.expired.excuse == "is stopped, or in a debugger"


def test_a_rank_that_was_asked_to_stop_has_a_deadline_of_its_own(task):
    """The deadline ends the rank, so the wrapper need not end other ranks that wait for it."""
    task.pass_s(LIMIT_S + 1, is_stopping=True)
    task.ask()
    task.pass_s(LIMIT_S + 1, is_stopping=True)
    assert task.answer().excuse == "was asked to stop"


def test_progress_made_while_stacks_were_written_is_reported(task, monkeypatch):
    """Otherwise the wrapper would end a job that makes progress."""
    monkeypatch.setattr(processes, "descendants", lambda root=None: [])
    task.pass_s(LIMIT_S + 2)
    before = task.expired

    def slow(fd, pids):
        yield
        task.marks.advance()
        yield
        yield
        return dict.fromkeys(pids, 'Stack (most recent call first):\n  File "a.py", line 3 in f\n')

    monkeypatch.setattr(stacks, "gather", slow)
    (task.forge.parent / "hangs/1").mkdir(parents=True)
    task.ask(phase=QueryPhase.stacks, folder="hangs/1")
    until(lambda: task.pass_s(0.5) or task.answer(), "the answer")
    assert task.answer().count != before.count
    assert task.answer().line == task.answer().inside == "a.py:3 in f"


def test_a_query_of_another_attempt_is_ignored(task):
    """A network file system can still list a file that was deleted."""
    task.ask(attempt=2, phase=QueryPhase.end)
    assert not task.pass_s(20)


def test_stacks_are_gathered_without_waiting(task, monkeypatch):
    """The supervisor has to react to signals while it gathers stacks."""
    monkeypatch.setattr(processes, "descendants", lambda root=None: [])
    task.pass_s(LIMIT_S + 2)
    (task.forge.parent / "hangs/1").mkdir(parents=True)
    task.ask(phase=QueryPhase.stacks, folder="hangs/1")
    assert task.watch.tick_s == hang_watch.TICK_S
    task.watch.tick(0.5, is_stopping=False)
    while task.answer() is None:
        assert task.watch.tick_s == hang_watch.BUSY_TICK_S
        task.watch.tick(0.05, is_stopping=False)
    text = (task.forge.parent / "hangs/1/rank_0.txt").read_text()
    assert f"== process {os.getpid()}" in text
    assert "no Python stacks" in text  # nothing was registered here
    assert f"thread {os.getpid()} " in text


def test_a_report_that_cannot_be_written_raises_and_is_tried_again_later(task, monkeypatch):
    """On a full disk the task continues; the supervisor logs the error."""

    def full(*_):
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(hang_files, "write_json", full)
        with pytest.raises(OSError, match="no space"):
            task.pass_s(LIMIT_S + 2)
        assert task.expired is None
        task.pass_s(5)
    task.pass_s(10)
    assert task.expired is not None
