"""An error that comes while a stop is pending: the job resumes from its last checkpoint."""

import pytest
from harness import assert_same_run
from rows import few


@pytest.mark.parametrize("place", few(2, ["data 9", "end 12", "begin 9", "updated 9"]))
def test_an_error_while_a_stop_is_pending_saves_nothing(place, tmp_path, make_job, undisturbed):
    """The signal hit a helper first, and its end is what the loop stumbles over, inside a step."""
    spec = {"loop": "raises", "policy": {"checkpoint": {"every_steps": 4}}}
    job = make_job(tmp_path / "job", script="loops.py", kill_at={place: "TERM"}, **spec)
    job.run_to_end(1)
    assert job.history.attempts[1].start_step in (8, 12)
    assert_same_run(job, undisturbed(script="loops.py", **spec))
