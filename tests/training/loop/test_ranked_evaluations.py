"""A stop that comes while ranks are in functions of `run.every`, each somewhere else."""

import pytest
from chaos import repeated_after_cooperative
from ranked import RankedJob
from rows import few


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = RankedJob(tmp_path_factory.mktemp("undisturbed"), 2, "evaluating.py")
    job.run_to_end()
    return job


def stopped(directory, evaluates, signalled):
    meets = [rank for rank, how in enumerate(evaluates) if how != "at once"]
    spec = {"evaluates": evaluates, "signal": signalled, "meets": meets}
    job = RankedJob(directory, 2, "evaluating.py", **spec)
    assert job.run() == [75, 75], job.output
    (attempt,) = job.history.attempts
    assert [e["step"] for e in attempt.events if e["kind"] == "stop"] == [10], job.output
    return job


@pytest.mark.parametrize("signalled", [pytest.param(0, marks=pytest.mark.proofs), 1])
@pytest.mark.parametrize("other", few(1, ["hears nothing", "polls", "stands"]))
def test_a_stop_waits_for_no_evaluation_on_any_rank(other, signalled, undisturbed, tmp_path):
    """An evaluation of an hour must not cost the last hour: where all hold the boundary it is saved

    at once, also of a rank that does not ask, or stands in a collective of the others.
    """
    job = stopped(tmp_path, ["polls", other], signalled)
    assert (job.checkpoints / "step_10").is_dir()
    job.run_to_end()
    job.assert_same_run(undisturbed)
    assert repeated_after_cooperative(job) == [0]


def test_a_rank_that_is_done_leaves_with_the_others(undisturbed, tmp_path):
    """It waits for the end of the longest function, and hears of the stop there."""
    job = stopped(tmp_path, ["polls", "at once"], 0)
    job.run_to_end()
    job.assert_same_run(undisturbed)


def test_an_evaluation_that_the_signal_breaks_is_no_failure(undisturbed, tmp_path):
    """A helper process of the evaluation may die of it, and the function raise."""
    job = stopped(tmp_path, ["polls", "fails"], 1)
    job.run_to_end()
    job.assert_same_run(undisturbed)
