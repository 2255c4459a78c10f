"""The file with a job's state: what is written is read back, and so are files of other versions."""

import errno
import json
import os
from dataclasses import asdict

import pytest

from forge.errors import Reason
from forge.filesystem import preallocated_file
from forge.jobdir import job_state
from forge.jobdir.job_files import STATE, forge_dir
from forge.jobdir.job_state import Counts, JobState, State


@pytest.fixture
def path(tmp_path):
    forge_dir(tmp_path).mkdir()
    return forge_dir(tmp_path) / STATE


def test_what_is_written_is_read_back(tmp_path, path):
    """A restart continues with the counts of the start before."""
    state = JobState(
        state=State.stopped,
        because="preempted",
        reason=Reason.preempted,
        counts=Counts(restarts=3, by_rule={"0": 2}, recovery={"rule": 0, "code": 7}),
        job="12_3",
        start="2",
        backend={"step": 4, "excluded": ["n1"]},
    )
    state.write(tmp_path)
    assert job_state.read(tmp_path) == state
    content = json.loads(path.read_text())
    assert (content["version"], content["state"], content["step"]) == (1, "stopped", 4)
    assert (content["host"], content["pid"]) == (os.uname().nodename, os.getpid())


def test_fields_of_a_later_version_do_not_end_a_job(tmp_path, path):
    """A user can go back to the version before."""
    counts = asdict(Counts(failures=1)) | {"new": 1}
    path.write_text(json.dumps({"version": 2, "state": "running", "counts": counts, "more": 5}))
    state = job_state.read(tmp_path)
    assert (state.state, state.counts, state.backend) == (
        *(State.running, Counts(failures=1)),
        {"more": 5},
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "odd"}', '{"state": ["odd"]}'])
def test_a_file_that_makes_no_sense_is_no_state(text, tmp_path, path):
    """A crash of the machine can leave it empty; the job then starts with new budgets."""
    path.write_text(text)
    assert job_state.read(tmp_path) is None


def test_on_a_full_disk_the_state_is_replaced_in_place(tmp_path, path, monkeypatch):
    """Otherwise a job that waits for room on the disk would lose its counts."""
    JobState(state=State.running).write(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(preallocated_file, "write_atomically", full)
    counts = Counts(failures=7, by_rule={str(n): 1 for n in range(20)})
    JobState(state=State.failed, because="the disk is full" * 40, counts=counts).write(tmp_path)
    assert job_state.read(tmp_path).counts == counts
