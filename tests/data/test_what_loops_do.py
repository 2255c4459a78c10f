"""What people's loops do around their steps: each is stopped once, and ends with the same bits."""

import pytest


@pytest.mark.parametrize(
    "place",
    [
        "step 7",
        "poll between",
        "step 8",
        "step 13",
    ],
)
def test_an_evaluation_between_two_loops(place, stop_and_compare):
    """It runs again at a resume; the second loop goes on with the random state it leaves."""
    job = stop_and_compare(place, loop="between")
    assert job.steps_repeated == [0]


@pytest.mark.parametrize("place", ["step 12", "poll 13"])
def test_a_batch_that_the_loop_takes_apart_is_saved_as_it_came(place, stop_and_compare):
    """`batch.pop("labels")` before the model is called with the rest."""
    stop_and_compare(place, loop="pops")


@pytest.mark.parametrize("step", [7, 8, 13])
def test_what_was_unfrozen_is_trained_on_after_a_resume(step, stop_and_compare):
    """The script freezes it at each start, and thaws it in one step that is not repeated."""
    job = stop_and_compare(f"step {step}", loop="unfreezes")
    assert [values["trained"] for values in job.history.metrics.values()] == [4] * 8 + [6] * 12


@pytest.mark.parametrize("place", ["poll 13 between", "poll 13 after"])
def test_two_updates_in_a_step_are_both_there_or_both_repeated(place, stop_and_compare):
    """A GAN's: between them the first is done, and its loss was computed before it was."""
    job = stop_and_compare(place, loop="gan")
    assert job.steps_repeated == [1]
