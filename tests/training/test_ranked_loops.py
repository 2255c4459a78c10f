"""Epochs on several ranks, saves by the clock and beside training, metrics of one rank."""

import pytest
from harness import assert_same_bits
from ranked import RankedJob

SIZE = 2


def struck(directory, *events, **spec):
    return RankedJob(directory, SIZE, "struck.py", events=events, pause_s=0.01, **spec)


def run(job):
    """The exit codes of one attempt, which leaves no process."""
    processes = job.start()
    codes = [one.wait() for one in processes]
    assert all(one.is_session_gone() for one in processes), job.output
    return codes


def events_of(job, kind):
    return [e for a in job.history.attempts for e in a.events if e["kind"] == kind]


@pytest.fixture(scope="module")
def epochs(tmp_path_factory):
    """Four epochs of six steps each, whose samples a DistributedSampler deals anew each time."""
    job = struck(tmp_path_factory.mktemp("epochs"), epochs=4)
    job.run_to_end()
    assert len(job.history.metrics) == 4 * 6

    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Sixteen steps."""
    job = struck(tmp_path_factory.mktemp("undisturbed"))
    job.run_to_end()
    return job


@pytest.mark.parametrize(
    "event",
    [
        ["pass", 1, 1, "SIGUSR1"],
        pytest.param(["step", 8, 1, "SIGUSR1"], marks=pytest.mark.proofs),
        pytest.param(["function", 10, 0, "SIGUSR1"], marks=pytest.mark.proofs),
    ],
    ids=["after a pass", "in a pass", "in a function"],
)
def test_a_stop_in_epochs_comes_after_the_same_step_on_all(event, epochs, tmp_path):
    """Wherever one rank is signalled; the other may be in the next pass already."""
    job = struck(tmp_path, event, epochs=4)
    assert run(job) == [75] * SIZE, job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(epochs)


@pytest.mark.proofs
@pytest.mark.parametrize("place", ["step", "pass", "function", "state"])
def test_a_kill_in_epochs_costs_no_bit(place, epochs, tmp_path):
    """The others end with it, and all resume from the save before."""
    step = {"step": 14, "pass": 2, "function": 10, "state": 11}[place]
    job = struck(tmp_path, [place, step, 1, "SIGKILL"], epochs=4, checkpoint={"every_steps": 4})
    codes = run(job)
    assert codes[1] == -9
    assert codes[0] in (1, 70), job.output
    assert run(job) == [0] * SIZE, job.output
    job.assert_same_run(epochs)


@pytest.mark.parametrize(
    "stop",
    [[], pytest.param([["step", 8, 0, "SIGUSR1"]], marks=pytest.mark.proofs)],
    ids=["at once", "after a stop"],
)
def test_what_one_rank_finishes_after_a_pass_ends_the_epochs_of_all(stop, tmp_path):
    """Early stopping: after the same epoch in every run."""
    job = struck(tmp_path, *stop, ["pass", 2, 1, "finish"], epochs=6)
    job.run_to_end(*[[75] * SIZE for _ in stop])
    assert [int(one["steps"]) for one in job.weights] == [18, 18]
    assert [e["text"] for e in events_of(job, "finish")] == ["enough"]


@pytest.mark.proofs
def test_a_rollback_into_an_earlier_epoch_restarts_all(tmp_path):
    """No `for` goes back: all leave, and the next attempt reads the batches again."""
    nan = {"action": "rollback", "max_consecutive": 1, "rollback": {"steps_back": 4}}
    spec = {"always": [[13, 1, "nan"]], "policy": {"nan": nan}, "checkpoint": {"every_steps": 4}}
    whole = struck(tmp_path / "whole", epochs=4, **spec)
    codes = [run(whole) for _ in range(4)]
    assert codes == [[75] * SIZE] * 3 + [[65] * SIZE], whole.output
    assert [e["step"] for e in events_of(whole, "rollback")] == [8, 8, 8]


def test_a_save_by_the_clock_is_one_of_all_ranks(undisturbed, tmp_path):
    """Clocks differ: rank 0's counts, and all save at the boundary that they agree on."""
    job = struck(tmp_path, checkpoint={"every_s": 0.05, "every_steps": None})
    assert run(job) == [0, 0], job.output
    assert [e for e in events_of(job, "save") if e["reason"] == "periodic"]
    job.assert_same_run(undisturbed)


@pytest.mark.parametrize(
    "on_pending_save", ["skip", pytest.param("wait", marks=pytest.mark.proofs)]
)
def test_saves_beside_training_are_of_the_same_steps_on_all(on_pending_save, undisturbed, tmp_path):
    """Of many ranks some would be busy, and some would not: all wait."""
    saves = {
        "async_save": True,
        "every_steps": 2,
        "on_pending_save": on_pending_save,
        "keep_last": 100,
    }
    job = struck(tmp_path, ["step", 9, 1, "SIGUSR1"], checkpoint=saves)
    job.run_to_end([75] * SIZE)
    assert {2, 4, 6, 8, 10, 12, 14} <= {e["step"] for e in events_of(job, "save")}
    assert not events_of(job, "save_skipped")
    job.assert_same_run(undisturbed)


def test_what_rank_0_alone_logs_resumes_as_it_was_logged(tmp_path):
    """Most scripts log on rank 0 alone; the others have metrics of their own, or none."""
    whole = struck(tmp_path / "whole", only_first_logs=True)
    whole.run_to_end()
    stopped = struck(tmp_path / "stopped", ["step", 7, 1, "SIGUSR1"], only_first_logs=True)
    stopped.run_to_end([75] * SIZE)
    assert len(whole.history.metrics) == 16
    stopped.assert_same_run(whole)


def test_epochs_deal_other_samples_in_each(epochs, tmp_path):
    """In a loop over steps forge calls `set_epoch`; in epochs the script does, with equal bits."""
    firsts = [epochs.history.metrics[6 * epoch]["first"] for epoch in range(4)]
    assert len({*firsts}) > 1
    flat = struck(tmp_path, n=24)
    flat.run_to_end()
    for one, other in zip(flat.weights, epochs.weights, strict=True):
        assert_same_bits(one, other)
