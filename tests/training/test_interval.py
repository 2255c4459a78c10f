"""`checkpoint.every_s: auto`: computed from what saves cost and how often the job was lost."""

import json
import os
import signal
import statistics

import pytest

import forge
from forge.jobdir import ledger
from forge.training import interval
from forge.training.interval import FACTOR, LEAST_S, MOST_S, PRIOR_S, interval_s

HOUR = 3600.0


def written(folder, *attempts):
    """Ledgers of earlier attempts: a list of events for each, with their times."""
    own = folder / ".forge" / "ledger"
    own.mkdir(parents=True)
    for number, events in enumerate(attempts, 1):
        lines = [{"t": 0.0, "kind": "run", "checkpoints": "."}]
        lines += [{"t": t, "kind": kind, **more} for t, kind, more in events]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (own / f"attempt_{number:04}.jsonl").write_text(text)
    return folder


def start(t=0.0, **more):
    return t, "start", {"step": 0, "summary": {}, **more}


def save(t, *waits):
    return t, "save", {"step": 1, "waits": waits, "summary": {}}


def test_it_is_young_s_formula_within_its_bounds():
    """sqrt(2 C M): 4 s and 8 h give 8 minutes; nothing is saved each second, or once a day."""
    assert interval_s(4.0, 0.0, 0) == pytest.approx((2 * 4.0 * PRIOR_S) ** 0.5)
    assert interval_s(4.0, 16 * HOUR, 2) == pytest.approx((2 * 4.0 * 8 * HOUR) ** 0.5)
    assert interval_s(1e-9, 0.0, 0) == LEAST_S
    assert interval_s(1e4, 0.0, 0) == MOST_S


def test_it_changes_by_at_most_a_factor_of_two_a_start():
    """One slow save, or three kills in an hour, must not turn everything over."""
    assert interval_s(1.0, 0.0, 100, before_s=400.0) == 400.0 / FACTOR
    assert interval_s(60.0, 0.0, 0, before_s=100.0) == 100.0 * FACTOR


def test_the_first_start_uses_the_estimate_of_a_save(tmp_path):
    """There is no ledger yet."""
    found = interval.decide(tmp_path, ".", 2.0)
    assert (found.cost_s, found.trained_s, found.num_losses) == (2.0, 0.0, 0)
    assert found.every_s == round(interval_s(2.0, 0.0, 0), 1)


def test_the_median_of_the_last_saves_and_all_training_count(tmp_path):
    """Of two attempts: an hour that was lost, and two hours that a stop ended."""
    first = [
        start(0.0, interval={"every_s": 300.0}),
        save(HOUR - 9, 1.0, 9.0),
        (HOUR, "metrics", {}),
    ]
    second = [start(5000.0), save(5000 + HOUR, 3.0, 1.0, 5.0), (5000 + 2 * HOUR, "stop", {})]
    found = interval.decide(written(tmp_path, first, second), ".", 9.0)
    assert found.cost_s == statistics.median([3.0, 1.0, 5.0])
    assert found.trained_s == 3 * HOUR
    assert found.num_losses == 1
    assert found.every_s == round(interval_s(3.0, 3 * HOUR, 1, before_s=300.0), 1)
    assert interval.decide(tmp_path, "other", 9.0).trained_s == 0.0  # of another Run


@pytest.mark.parametrize(
    ("events", "is_loss"),
    [
        ([], True),
        ([save(1.0, 1.0)], True),
        ([("error", {"reason": "rank_lost"})], True),
        ([("error", {"reason": "failed"})], False),
        ([("stop", {"reason": "preempted"})], False),
        ([("halt", {"reason": "halted"})], False),
        ([("finish", {})], False),
        ([("saving", {"step": 3})], False),
        ([("saving", {"step": 3}), save(1.0, 1.0)], True),
        ([("saving", {"step": 3}), ("save_failed", {"step": 3})], True),
    ],
    ids=str,
)
def test_only_ends_without_a_save_that_the_user_did_not_cause_are_losses(tmp_path, events, is_loss):
    """A bug of the script, or a save that took too long, says nothing about the machine."""
    own = [start(), *(one if len(one) == 3 else (1.0, *one) for one in events)]
    assert interval.decide(written(tmp_path, own), ".", 1.0).num_losses == is_loss


def test_a_killed_run_is_a_loss_of_the_next_start(tmp_path):
    """The whole way: default policy, SIGKILL, and what the ledger of the next start says."""
    policy = {"checkpoint": {"dir": str(tmp_path)}}
    pid = os.fork()
    if pid == 0:
        with forge.Run(policy) as run:
            for step in run.steps(20):
                if step == 5:
                    run.save()
                if step == 9:
                    os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with forge.Run(policy) as run:
        for _ in run.steps(20):
            pass
    first, second = ledger.read(tmp_path).attempts
    (began,) = [one for one in second.events if one["kind"] == "start"]
    assert began["interval"]["is_auto"]
    assert began["interval"]["num_losses"] == 1
    before = next(one for one in first.events if one["kind"] == "start")["interval"]["every_s"]
    assert before / FACTOR <= began["interval"]["every_s"] <= before * FACTOR
    kinds = [one["kind"] for one in second.events]
    assert kinds.index("training") < kinds.index("caught_up") < kinds.index("finish")
    (caught_up,) = [one for one in second.events if one["kind"] == "caught_up"]
    assert caught_up["step"] == 10


def test_a_number_in_the_policy_is_taken_as_it_is(tmp_path):
    """Nothing is computed."""
    policy = {"checkpoint": {"dir": str(tmp_path), "every_s": 7}}
    with forge.Run(policy) as run:
        for _ in run.steps(2):
            pass
    (attempt,) = ledger.read(tmp_path).attempts
    (began,) = [one for one in attempt.events if one["kind"] == "start"]
    assert began["interval"]["every_s"] == 7
    assert not began["interval"]["is_auto"]


def test_a_new_job_saves_early_and_then_at_the_interval(tmp_path, monkeypatch):
    """So a disk that cannot be written to is known soon, and an early kill costs little."""
    monkeypatch.setattr(interval, "LEAST_S", 0.0)
    with forge.Run({"checkpoint": {"dir": str(tmp_path)}}) as run:
        for _ in run.steps(5):
            pass
    (attempt,) = ledger.read(tmp_path).attempts
    saves = [one for one in attempt.events if one["kind"] == "save"]
    assert [(one["step"], one["reason"]) for one in saves] == [(1, "periodic"), (5, "end")]
