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

WRAPPER = {
    **{"state": "failed", "because": "why", "pid": 7, "time": 5.0, "has_steps": False},
    **{"counts": {"preemptions": 2, "unfair": 4, "no_limit": 1}, "code": 70, "reason": "hung"},
    **{"rank": 3, "slurm_job": "12_3", "slurm_restarts": 2, "ancestors": ["9"], "step": 4},
}
"""What the wrapper of a Slurm job wrote before the file had a version."""
RECORD = {"job": "7", "start": "1", "because": "busy", "code": 0, "counts": {"restarts": 3}}
"""The same of a job without a wrapper."""


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


def test_a_file_of_a_wrapper_without_a_version_is_read(tmp_path, path):
    """A job that waits in the queue while forge is replaced must keep its budgets."""
    path.write_text(json.dumps(WRAPPER))
    state = job_state.read(tmp_path)
    assert (state.state, state.reason, state.code, state.rank) == (State.failed, Reason.hung, 70, 3)
    assert (state.job, state.start, state.began, state.has_steps) == ("12_3", "2", 5.0, False)
    assert state.counts == Counts(preemptions=2, early_evictions=4)
    assert state.backend == {"ancestors": ["9"], "step": 4}


@pytest.mark.parametrize(
    ("name", "expected", "ends_next_start"),
    [
        ("started", State.running, False),
        ("requeued", State.queued, False),
        ("given up", State.stopped, True),
        ("finished", State.finished, False),
    ],
)
def test_states_without_a_version_have_the_names_of_today(
    name, expected, ends_next_start, tmp_path, path
):
    """Jobs with and without a wrapper had different names for the same states."""
    path.write_text(json.dumps(RECORD | {"state": name, "time": 5.0, "pid": 1}))
    state = job_state.read(tmp_path)
    assert (state.state, state.ends_next_start) == (expected, ends_next_start)
    assert (state.job, state.start, state.counts.restarts) == ("7", "1", 3)


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
