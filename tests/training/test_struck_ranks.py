"""What becomes true on one rank alone ends, or changes, the training of all in the same way.

Each test looks at the exit code of every rank, and none may leave a process.
"""

import signal

import pytest
from ranked import RankedJob

SIZE = 2
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = RankedJob(tmp_path_factory.mktemp("undisturbed"), SIZE, "struck.py")
    job.run_to_end()
    return job


def struck(directory, *events, size=SIZE, **spec):
    return RankedJob(directory, size, "struck.py", events=events, **spec)


def run(job):
    """The exit codes of one attempt, which leaves no process."""
    processes = job.start()
    codes = [one.wait() for one in processes]
    assert all(one.is_session_gone() for one in processes), job.output
    return codes


PLACES = {
    "a save": ["state", 7, "SIGKILL"],
    "a function": ["function", 10, "SIGKILL"],
    "its own exit": ["function", 10, "exit"],
}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_where_others_wait_for_it_ends_them(place, who, undisturbed, tmp_path):
    """They would wait for half an hour, and the node would be paid for it."""
    where, step, what = PLACES[place]
    job = struck(tmp_path, [where, step, who, what], checkpoint={"every_steps": 4})
    codes = run(job)
    assert codes.pop(who) == (3 if what == "exit" else KILLED)
    assert codes == [70] * (SIZE - 1), job.output
    assert "is gone" in job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_as_the_job_resumes_ends_the_others(who, undisturbed, tmp_path):
    """Before the first step there is a lot that ranks wait for each other in."""
    events = ["step", 9, 1, "SIGUSR1"], ["load", 0, who, "SIGKILL"]
    job = struck(tmp_path, *events)
    assert run(job) == [75] * SIZE, job.output
    codes = run(job)
    assert codes.pop(who) == KILLED
    assert set(codes) <= {1, 70}, job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)
