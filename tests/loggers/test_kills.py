"""Loggers of a job that is killed, stopped and rolled back: each value once, none missing."""

import pytest
from logged_values import READERS, compared
from rows import few

from forge.jobdir import ledger

LOGGERS = ["CSV", "TensorBoard"]
RIGHT = {"missing": [], "repeated": [], "unknown": [], "different": []}
ROLLBACK = {"nan": {"action": "rollback", "max_consecutive": 2, "rollback": {"steps_back": 5}}}


def in_ledger(job):
    metrics = ledger.read(job.checkpoints).metrics
    return {(step, name): value for step, row in metrics.items() for name, value in row.items()}


def assert_each_once(job, kinds):
    expected = in_ledger(job)
    assert {step for step, _ in expected} == set(range(60))
    for kind in kinds:
        assert compared(READERS[kind](job.checkpoints), expected) == RIGHT, kind


def attempts(job, *hits):
    """One attempt for each hit, which ends with it, and one that finishes."""
    for hit in hits:
        code = job.run(HIT=hit)
        assert code == (-9 if hit.endswith("KILL") else 143), job.output
    assert job.run() == 0, job.output


def test_each_value_is_there_once_after_kills_and_stops(make_job, tmp_path):
    """A curve that goes back at each restart, or has gaps, is of no use."""
    job = make_job(tmp_path, "logged.py", loggers=LOGGERS)
    attempts(job, "13 SIGKILL", "33 SIGTERM", "38 SIGKILL")
    assert_each_once(job, LOGGERS)
    assert len(list(job.checkpoints.glob("tensorboard/*"))) == 4


def test_a_rollback_takes_back_the_values_of_its_steps(make_job, tmp_path):
    """Otherwise the curve shows the steps that made the weights NaN, and their repetition."""
    job = make_job(tmp_path, "logged.py", loggers=LOGGERS, bad_steps=[33, 34], policy=ROLLBACK)
    attempts(job, "52 SIGKILL")
    assert "rollback" in {
        event["kind"] for one in ledger.read(job.checkpoints).attempts for event in one.events
    }
    assert_each_once(job, LOGGERS)


@pytest.mark.parametrize("place", ["34", "evaluation_35"])
def test_a_stop_before_an_evaluation_loses_none_of_its_values(make_job, tmp_path, place):
    """The resumed job does the evaluation, and its values belong to a step of the job before."""
    job = make_job(tmp_path, "logged.py", loggers=LOGGERS)
    attempts(job, f"{place} SIGTERM")
    assert (34, "held_out") in in_ledger(job)
    assert_each_once(job, LOGGERS)


@pytest.mark.parametrize("damage", few(2, ["torn", "removed", "emptied"]))
def test_what_a_crash_took_from_a_file_is_written_again(make_job, tmp_path, damage):
    """A power cut takes what the system had not written yet; the ledger has it."""
    job = make_job(tmp_path, "logged.py", loggers=LOGGERS)
    assert job.run(HIT="33 SIGTERM") == 143, job.output
    for path in [job.checkpoints / "metrics.csv", *job.checkpoints.glob("tensorboard/*")]:
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) - 9 if damage == "torn" else 0])
    attempts(job)
    assert_each_once(job, LOGGERS)
