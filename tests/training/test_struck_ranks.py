"""An event on a single rank ends or changes the training of all ranks in the same way.

Each test checks the exit code of every rank, and that no process remains.
"""

import signal

import pytest
from ranked import RankedJob
from rows import few

SIZE = 2
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = RankedJob(tmp_path_factory.mktemp("undisturbed"), SIZE, "struck.py")
    job.run_to_end()
    return job


def struck(directory, *events, size=SIZE, **spec):
    return RankedJob(directory, size, "struck.py", events=events, pause_s=0.03, **spec)


def run(job):
    """The exit codes of one attempt, after which no process remains."""
    processes = job.start()
    codes = [one.wait() for one in processes]
    assert all(one.is_session_gone() for one in processes), job.output
    return codes


PLACES = {
    "a save": ["state", 7, "SIGKILL"],
    "a function": ["function", 10, "SIGKILL"],
    "its own exit": ["function", 10, "exit"],
}


@pytest.mark.parametrize(
    ("place", "who"),
    few(
        1,
        [
            *(("a save", 1), ("a function", 0), ("a save", 0), ("a function", 1)),
            *(("its own exit", 0), ("its own exit", 1)),
        ],
    ),
)
def test_a_rank_that_dies_where_others_wait_for_it_ends_them(place, who, undisturbed, tmp_path):
    """Otherwise the others would wait for half an hour, on a node that costs money."""
    where, step, what = PLACES[place]
    job = struck(tmp_path, [where, step, who, what], checkpoint={"every_steps": 4})
    codes = run(job)
    assert codes.pop(who) == (3 if what == "exit" else KILLED)
    assert codes == [70] * (SIZE - 1), job.output
    assert "is gone" in job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)


@pytest.mark.proofs
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_as_the_job_resumes_ends_the_others(who, undisturbed, tmp_path):
    """Before the first step the ranks wait for each other in many places."""
    events = ["step", 9, 1, "SIGUSR1"], ["load", 0, who, "SIGKILL"]
    job = struck(tmp_path, *events)
    assert run(job) == [75] * SIZE, job.output
    codes = run(job)
    assert codes.pop(who) == KILLED
    assert set(codes) <= {1, 70}, job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)


def saved_by(job, cause):
    """The steps at which the last attempt saved for this cause."""
    events = job.history.attempts[-1].events
    return [e["step"] for e in events if e["kind"] == "save" and e["reason"] == cause]


@pytest.mark.parametrize("what", few(1, ["clock", "SIGTERM"]))
def test_what_stops_one_rank_stops_all(what, undisturbed, tmp_path):
    """A signal, or the time limit of the job by the clock of one rank."""
    event = ["start", 0, 1, "clock"] if what == "clock" else ["step", 6, 1, what]
    job = struck(tmp_path, event)
    assert run(job) == [75 if what == "clock" else 143] * SIZE, job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)


@pytest.mark.parametrize("what", few(2, ["SIGUSR2", "save"]))
@pytest.mark.parametrize("who", [1, pytest.param(-1, marks=pytest.mark.proofs)], ids=["one", "all"])
def test_a_save_that_one_rank_asks_for_is_one_of_all(what, who, undisturbed, tmp_path):
    """All ranks save at the same boundary."""
    signals = {"signal": {"name": "USR1", "actions": {"USR2": "save"}}}
    policy = {"keep_last": 1, "every_steps": None, "every_s": None}
    job = struck(tmp_path, ["step", 6, who, what], checkpoint=policy, policy=signals)
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)
    saved = saved_by(job, "requested")
    assert saved
    assert 7 <= saved[0] <= saved[-1] <= 7 + 3
    kept = {one.name for one in job.checkpoints.glob("step_*")}
    assert kept == {"step_16"}


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.proofs), 1])
def test_a_disk_that_fails_for_one_rank_fails_the_save_of_all(who, undisturbed, tmp_path):
    """All ranks count it, and the next save succeeds; if it was the last save, all ranks end."""
    once = [["state", 7, who, "full"], ["step", 9, who, "room"]]
    job = struck(tmp_path, *once, ["step", 13, who, "full"], checkpoint={"every_steps": 4})
    assert run(job) == [74] * SIZE, job.output
    failed = [e["step"] for e in job.history.attempts[0].events if e["kind"] == "save_failed"]
    assert failed[0] == 8
    assert saved_by(job, "periodic") == [4, 12]
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)


def test_a_node_that_is_unhealthy_for_one_rank_is_refused_by_all(tmp_path):
    """Otherwise the other ranks would wait for it, or train without it."""
    refuses = {"health": {"checks": {"disk": "refuse"}}}
    job = struck(tmp_path, ["start", 0, 1, "unhealthy"], policy=refuses)
    assert run(job) == [69] * SIZE, job.output
    assert "Health check `disk` failed" in job.printed[1][0]


def test_an_older_attempt_that_wakes_up_ends_on_all_ranks(tmp_path):
    """It must not commit a checkpoint, and all of its ranks must exit."""
    job = struck(tmp_path, ["step", 6, 1, "taken"], checkpoint={"every_steps": 4})
    assert run(job) == [73] * SIZE, job.output
    assert {one.name for one in job.checkpoints.glob("step_*")} == {"step_4"}


@pytest.mark.parametrize("place", few(1, ["batch", "function"]))
def test_an_error_of_the_user_on_one_rank_ends_all(place, undisturbed, tmp_path):
    """The other ranks wait for the end of its evaluation, or for its gradients."""
    job = struck(tmp_path, [place, 10, 1, "exception"], checkpoint={"every_steps": 4})
    codes = run(job)
    assert codes[1] == 1
    assert codes[0] == 70 if place == "function" else codes[0] in (1, 70), job.output
    assert "RuntimeError: planted" in job.printed[1][-1]
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(undisturbed)


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.proofs), 1])
def test_a_rank_that_enters_the_run_alone_ends_and_says_so(who, tmp_path):
    """Otherwise a script with `if rank == 0:` around the Run would hang."""
    job = struck(tmp_path, ["start", 0, 1 - who, "stays out"], start_s=0.5)
    codes = run(job)
    assert (codes[who], codes[1 - who]) == (70, 0), job.output
    said = " ".join(job.printed[who])
    assert f"rank {who} waited for rank {1 - who} of 2" in said
    assert "Every rank has to enter" in said


def test_a_save_outside_a_loop_is_called_by_every_rank(undisturbed, tmp_path):
    """If only one rank calls it, it would hang, or join the last save of the others."""
    together = struck(tmp_path / "all", ["outside", 15, -1, "save"])
    assert run(together) == [0] * SIZE, together.output
    together.assert_same_run(undisturbed)
    alone = struck(tmp_path / "one", ["outside", 15, 1, "save"], all_s=0.5)
    assert run(alone) == [70] * SIZE, alone.output
    assert "run.save() outside a loop, which every rank has to call" in alone.output
    assert run(alone) == [0] * SIZE, alone.output
    alone.assert_same_run(undisturbed)
