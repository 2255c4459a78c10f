"""Ctrl+C: the terminal signals the whole foreground group, once or twice."""

import signal

import pytest
from forked import ForkedJob
from harness import Job
from test_signals import events, start_and_wait


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["loop", "building"])
@pytest.mark.parametrize("children", [["stubborn"], ["processes"], ["threads"]])
def test_the_first_stops_gracefully_and_leaves_no_process(tmp_path, stage, children):
    """Executors and children are ended, also such as ignore SIGINT."""
    job = ForkedJob(
        tmp_path / "job", "stages.py", stage=stage, children=children, early_callbacks=True
    )
    process = start_and_wait(job)
    process.signal_session(signal.SIGINT)
    assert process.wait() == 130
    assert process.is_session_gone()
    assert "callback first" in events(job)
    if stage == "loop":
        assert (job.checkpoints / "latest").resolve().name == "step_3"


@pytest.mark.parametrize("stage", ["loop", "c_call", "building"])
def test_the_second_exits_at_once_and_leaves_no_process(tmp_path, stage):
    """Whoever presses it again wants out, whatever the job is doing."""
    children = ["stubborn", "processes"]
    job = ForkedJob(tmp_path / "job", "stages.py", stage=stage, children=children, linger_s=60)
    if stage == "building":
        job.spec["early_callbacks"] = True
    process = start_and_wait(job)
    process.signal_session(signal.SIGINT)
    # Two that are pending at the same moment are one for the kernel.
    process.wait_for(lambda: not process.is_pending(signal.SIGINT), "the first to arrive")
    process.signal_session(signal.SIGINT)
    assert process.wait() == 130
    assert process.is_session_gone()


@pytest.mark.slow
def test_a_thread_that_never_ends_does_not_keep_a_stopped_job(tmp_path):
    """The interpreter waits for threads; a job that saved and said so does not."""
    job = Job(tmp_path / "job", "stages.py", stage="loop", children=["thread"])
    process = start_and_wait(job)
    process.signal_session(signal.SIGINT)
    assert process.wait() == 130
