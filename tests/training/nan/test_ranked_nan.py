"""A NaN on one rank counts on all ranks: they skip, roll back or halt together, bit by bit."""

import pytest
from harness import assert_same_bits
from ranked import RankedJob
from rows import few

SIZE = 2


def job_of(directory, *always, nan, **spec):
    """`always`: (step, rank, kind), bad whenever that step is done."""
    saves = {"every_steps": 4}
    policy = {"nan": nan}
    return RankedJob(
        directory, SIZE, "struck.py", always=always, policy=policy, checkpoint=saves, **spec
    )


def events_of(job, kind):
    return [e for a in job.history.attempts for e in a.events if e["kind"] == kind]


def steps_of(job, kind):
    return [e["step"] for e in events_of(job, kind)]


def assert_ranks_are_alike(job):
    one, other = job.weights
    assert_same_bits(one, other)
    assert all(value.isfinite().all() for value in one.values() if value.is_floating_point())


@pytest.mark.parametrize("kind", ["nan gradient", pytest.param("nan", marks=pytest.mark.proofs)])
def test_a_bad_step_on_one_rank_is_skipped_by_all(kind, tmp_path):
    """Gradients are shared, losses are not: the weights of the ranks stay equal in both cases."""
    bad = [6, 1, kind], [9, 0, kind]
    whole = job_of(tmp_path / "whole", *bad, nan={"action": "skip"})
    whole.run_to_end()
    assert steps_of(whole, "nan") == [6, 9]
    assert_ranks_are_alike(whole)
    stop = ["step", 6, 0, "SIGUSR1"]
    stopped = job_of(tmp_path / "stopped", *bad, nan={"action": "skip"}, events=[stop])
    stopped.run_to_end([75] * SIZE)
    stopped.assert_same_run(whole)


@pytest.mark.parametrize(
    "nan",
    few(1, [{"action": "skip", "max_consecutive": 1}, {"action": "halt"}]),
    ids=["a streak", "halt"],
)
def test_what_halts_one_rank_halts_all(nan, tmp_path):
    """Each rank counts the bad steps of all ranks, and not only its own."""
    job = job_of(tmp_path, [9, 1, "nan"], nan=nan)
    assert job.run() == [65] * SIZE, job.output
    assert steps_of(job, "halt") == [10]


def test_a_streak_counts_steps_that_were_bad_on_different_ranks(tmp_path):
    """Three bad steps in a row count as three, even if each is on another rank."""
    bad = [7, 0, "nan"], [8, 1, "nan"], [9, 0, "nan gradient"]
    job = job_of(tmp_path, *bad, nan={"action": "skip", "max_consecutive": 3})
    assert job.run() == [65] * SIZE, job.output
    assert steps_of(job, "halt") == [10]


ROLLBACK = {"action": "rollback", "max_consecutive": 1, "rollback": {"max_rollbacks": 50}}


def poisoned(directory, *events, skip_data=True, size=SIZE, **spec):
    """One rank has a bad sample in each epoch; all ranks roll back and skip the same data."""
    nan = ROLLBACK | {"rollback": ROLLBACK["rollback"] | {"skip_data": skip_data, "lr_scale": 0.8}}
    policy = {"nan": nan}
    saves = {"every_steps": 4}
    return RankedJob(
        directory,
        size,
        "struck.py",
        events=events,
        policy=policy,
        checkpoint=saves,
        **{"n": 20, "poison": [3]} | spec,
    )


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    job = poisoned(tmp_path_factory.mktemp("whole"))
    job.run_to_end()
    assert len(steps_of(job, "rollback")) >= 2
    assert_ranks_are_alike(job)
    return job


@pytest.mark.parametrize("how", ["SIGUSR1", pytest.param("SIGKILL", marks=pytest.mark.proofs)])
def test_a_job_that_was_rolled_back_resumes_with_the_same_bits(how, rolled_back, tmp_path):
    """Before and in a rollback, which all ranks make and count alike, and after another one."""
    goes_back = [e["from_step"] for e in events_of(rolled_back, "rollback")]
    strikes = [["step", step, 1, how] for step in (3, goes_back[-1])]
    job, codes = poisoned(tmp_path, *strikes), []
    while not codes or (any(codes[-1]) and len(codes) < 6):
        codes.append(job.run())
    assert codes.pop() == [0] * SIZE, job.output
    assert codes
    if how == "SIGUSR1":
        assert all(one == [75] * SIZE for one in codes)
    else:
        assert all(one[1] == -9 and one[0] in (1, 70) for one in codes)
    job.assert_same_run(rolled_back)


@pytest.mark.proofs
def test_where_the_rollbacks_are_used_up_all_halt(tmp_path):
    """The budget is counted in every process, and has to be the same in all."""
    job = poisoned(tmp_path, skip_data=False)  # the same batch again, and again
    assert job.run() == [65] * SIZE, job.output
    assert "no rollback is left" in job.output
