"""An error that comes while a stop is pending: what is saved then is exact, or nothing is."""

import pytest
from harness import assert_same_run


@pytest.mark.parametrize(
    "place",
    [
        "data 9",
        "begin 9",
        "updated 9",
        "end 12",
        "end 13",
    ],
)
def test_an_error_while_a_stop_is_pending_still_saves(place, stop_and_compare):
    """The signal hit a helper first, and its end is what the loop stumbles over."""
    stop_and_compare(place, loop="raises")


@pytest.mark.parametrize(
    "place",
    [
        "data 3",
        "begin 4",
        *(f"data {step}" for step in (10, 13, 14)),
    ],
)
def test_an_error_while_a_stop_is_pending_saves_nothing_that_is_not_exact(
    place, tmp_path, make_job, undisturbed
):
    """After draws since the update, or where nothing was marked: better the last checkpoint."""
    job = make_job(tmp_path / "job", script="loops.py", kill_at={place: "TERM"}, loop="raises")
    assert job.run() in (1, 143), job.output
    job.run_to_end()
    assert_same_run(job, undisturbed(script="loops.py", loop="raises"))
