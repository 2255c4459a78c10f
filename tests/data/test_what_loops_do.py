"""What people's loops do around their steps: each is stopped once, and ends with the same bits."""

import pytest


@pytest.mark.parametrize(
    "place",
    [
        "step 7",
        "between",
        "step 8",
        "step 13",
    ],
)
def test_an_evaluation_between_two_loops(place, stop_and_compare):
    """It runs again at a resume; the second loop goes on with the random state it leaves."""
    job = stop_and_compare(place, loop="between")
    assert job.steps_repeated == [0]


@pytest.mark.parametrize("step", [7, 8, 13])
def test_what_was_unfrozen_is_trained_on_after_a_resume(step, stop_and_compare):
    """The script freezes it at each start, and thaws it in one step that is not repeated."""
    job = stop_and_compare(f"step {step}", loop="unfreezes")
    assert [values["trained"] for values in job.history.metrics.values()] == [4] * 8 + [6] * 12


def test_a_stop_between_the_two_updates_of_a_step_waits_for_its_end(stop_and_compare):
    """A GAN's: between them the first is done, and its loss was computed before it was."""
    job = stop_and_compare("between 13", loop="gan")
    assert job.steps_repeated == [0]
