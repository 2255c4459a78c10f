"""The heartbeat page, a shared memory that the task writes and its supervisor reads."""

import os
import struct
import sys

import pytest
from harness import wait_for
from started import Popen

from forge.process.progress import PROGRESS, HeartbeatPage, HeartbeatRecord, HeartbeatWriter, Phase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")


@pytest.fixture
def page():
    page = HeartbeatPage.create()
    yield page
    page.close()


@pytest.fixture
def marks(page):
    marks = HeartbeatWriter.open(page.environ)
    yield marks
    marks.close()


def test_what_is_marked_is_read(page, marks):
    """The supervisor decides from these values."""
    assert page.read() == HeartbeatRecord()  # before anything is marked
    marks.enter(Phase.save, 7, 12.5)
    assert page.read() == HeartbeatRecord(os.getpid(), Phase.save, 7, 1, 12.5)
    marks.enter(Phase.step, 8, 0.0)
    assert page.read() == HeartbeatRecord(os.getpid(), Phase.step, 8, 2, 0.0)


def test_every_mark_is_a_change(page, marks):
    """A save between two readings counts as progress, although the step is the same after it."""
    seen = set()
    for mark in (
        lambda: marks.enter(Phase.step, 3, 1.0),
        lambda: marks.enter(Phase.save, 3, 1.0),
        marks.advance,
        lambda: marks.enter(Phase.step, 3, 1.0),
    ):
        mark()
        seen.add(page.read())
    assert len(seen) == 4


def test_a_mark_that_is_being_written_is_not_read(page, marks):
    """Mixed values, like a limit of another section, could be taken for a hang."""
    marks.enter(Phase.start_up, 0, 1800.0)
    sequence = os.pread(page.fd, 8, 0)
    os.pwrite(page.fd, struct.pack("q", struct.unpack("q", sequence)[0] + 1), 0)
    assert page.read() is None
    marks.enter(Phase.step, 1, 300.0)  # after an exception in the middle of a write
    assert page.read() == HeartbeatRecord(os.getpid(), Phase.step, 1, 2, 300.0)


WRITER = """
import os, itertools
from forge.process.progress import HeartbeatWriter, Phase
marks = HeartbeatWriter.open(os.environ)
for number in itertools.count(1):
    marks.enter(Phase(number % 7), number, number * 2.0)
"""


def test_no_reading_mixes_two_marks(page):
    """The writer derives phase and limit from the step, so that mixed values are detected."""
    writer = Popen([sys.executable, "-c", WRITER], env=os.environ | page.environ)
    wait_for(lambda: page.read() not in (None, HeartbeatRecord()), writer, "mark")
    found = [page.read() for _ in range(50_000)]
    whole = [one for one in found if one is not None]
    assert all((one.section, one.limit_s) == (one.step % 7, one.step * 2.0) for one in whole)
    assert whole
    assert None in found


def test_a_fork_does_not_mark(page, marks):
    """Otherwise a loader's worker would report progress of a rank that waits for that worker."""
    marks.enter(Phase.step, 1, 5.0)
    before = page.read()
    child = os.fork()
    if not child:
        marks.advance()
        marks.enter(Phase.evaluation, 9, 9.0)
        os._exit(0 if not marks.is_open else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert page.read() == before
    marks.advance()  # the parent still writes heartbeats
    assert page.read() != before


def test_one_process_of_a_task_marks(page, marks):
    """Ranks spawned by a task share its page; as they wait for each other, one writer is enough."""
    marks.enter(Phase.step, 1, 5.0)
    before = page.read()
    code = (
        "import os; from forge.process.progress import HeartbeatWriter, Phase\n"
        "marks = HeartbeatWriter.open(os.environ); marks.enter(Phase.save, 9, 9.0)\n"
        "print(marks.is_open)"
    )

    def other() -> str:
        popen = Popen(
            [sys.executable, "-c", code], env=os.environ | page.environ, stdout=-1, text=True
        )
        return popen.communicate()[0].strip()

    assert other() == "False"
    assert page.read() == before
    marks.close()
    assert page.read().section is Phase.outside
    assert other() == "True"
    assert page.read().section is Phase.save
    assert page.read().count > before.count + 1  # the supervisor detects progress by the count


@pytest.mark.parametrize(
    "path", ["", "/proc/self/fd/12345", "/nowhere", "/proc/1/mem", "relative", "a file"]
)
def test_without_a_page_nothing_is_marked(path, tmp_path):
    """If the supervisor is gone, its descriptor can be of another file, which must not change."""
    if path == "a file":
        (tmp_path / "file").write_bytes(bytes(4096))
        path = str(tmp_path / "file")
    marks = HeartbeatWriter.open({PROGRESS: path} if path else {})
    assert not marks.is_open
    marks.enter(Phase.step, 1, 1.0)
    marks.advance()
    marks.close()
    if path.startswith(str(tmp_path)):
        assert (tmp_path / "file").read_bytes() == bytes(4096)


def test_the_page_cannot_be_cut(page):
    """After a truncation SIGBUS would kill the training at its next heartbeat."""
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)


def test_the_task_outlives_its_supervisor(page, marks):
    """Heartbeats continue to be written into memory that no process reads."""
    page.close()
    marks.enter(Phase.step, 1, 1.0)
    marks.advance()
    assert page.read() == HeartbeatRecord()


def test_where_there_is_no_such_memory_nothing_is_watched(monkeypatch):
    """A sandbox without memfd_create must not keep a task from being started."""

    def refused(*_):
        raise OSError

    monkeypatch.setattr(os, "memfd_create", refused)
    page = HeartbeatPage.create()
    assert (page.environ, page.read()) == ({}, HeartbeatRecord())
    page.close()
