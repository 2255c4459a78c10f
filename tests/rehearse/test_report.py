"""The report of a rehearsal on findings other than differences between runs."""

from pathlib import Path

import pytest
import torch

from forge.jobdir import ledger
from forge.rehearse import report
from forge.rehearse.comparing import are_near, differing_leaves, differing_values
from forge.rehearse.rehearsal import RehearsedRun


def run_of(*events, state=None, hits=()):
    """A run with one attempt for each list of events."""
    run = RehearsedRun("one", Path(), hits=list(hits), states={"checkpoints": state or {}})
    for number, own in enumerate(events, 1):
        first = {"kind": "run", "checkpoints": "checkpoints"}
        run.history.attempts.append(ledger.AttemptLog(number, [first, *own]))
    return run


def start(step=0):
    return {"kind": "start", "step": step}


def save(seconds, reason="periodic"):
    return {"kind": "save", "seconds": seconds, "reason": reason}


def hit(name, attempt, step):
    return name, ledger.Progress(attempt, step, 0.0, None)


SEEN = [start(), save(0.5), {"kind": "evaluated", "step": 1}]


def test_repeated_steps_are_counted_after_stops_alone():
    """Steps repeated after a kill are expected; after a stop they were not saved."""
    first = run_of(SEEN)
    hits = [hit("SIGTERM", 1, 7), hit("SIGKILL", 2, 9)]
    interrupted = run_of(SEEN, [start(5)], [start(5)], hits=hits)
    assert list(report.lines(first, [interrupted])) == [
        "2 steps were trained twice, in 1 run that was stopped by a signal that allows a save",
    ]


def test_a_process_that_is_left_is_named():
    """Once, although every run leaves the same."""
    first, other = run_of(SEEN), run_of(SEEN)
    first.left = other.left = ["sleep 600"]
    (left,) = report.lines(first, [other])
    assert left == "A process outlived the script that started it: sleep 600"


def position(epoch):
    return {"epochs": None, "positions": [None, {"epoch": epoch}]}


@pytest.mark.parametrize(
    ("events", "state", "missing"),
    [
        (SEEN, position(1), ""),
        (SEEN, position(0), "a second pass through the loader"),
        (SEEN, {"epochs": {"epoch": 1}}, "a second pass through the loader"),
        (SEEN, {"epochs": {"epoch": 2}}, ""),
        ([start(), save(0.1)], position(1), "an evaluation between steps"),
        ([start(), save(0.1)], {"positions": [{"is_pushed": True, "epoch": 3}]}, ""),
        ([*SEEN[::2], save(0.1, "finished")], position(1), "a periodic save"),
    ],
)
def test_what_was_not_exercised_is_named(events, state, missing):
    """Otherwise readers would take "identical" for more than was tested."""
    lines = report.lines(run_of(events, state=state), [])
    found = [line for line in lines if "Not tested" in line]
    assert bool(found) == bool(missing)
    assert not found or found[0].startswith(f"Not tested, because the script has none: {missing}")


def test_what_a_tolerance_lets_pass():
    """The tolerance is relative to a tensor's largest value; integers must be equal."""
    one, near = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.005])
    assert are_near(one, near, 0.01)
    assert not are_near(one, near, 0.001)
    assert not are_near(one, near, 0.0)
    assert not are_near(one, torch.tensor([1.0, float("nan")]), 0.01)
    assert not are_near(one, one[:1], 0.01)
    assert not are_near(torch.tensor([100]), torch.tensor([101]), 0.5)
    assert are_near(1.0, 1.005, 0.01)
    assert not are_near(100, 101, 0.5)


def test_runs_are_compared_within_the_tolerance():
    one, other = run_of(state={"w": torch.ones(2)}), run_of(state={"w": torch.ones(2) + 0.01})
    one.history.runs["c"], other.history.runs["c"] = {0: {"loss": 1.0}}, {0: {"loss": 1.01}}
    assert len(list(differing_leaves(one, other))) == len(list(differing_values(one, other))) == 1
    assert not list(differing_leaves(one, other, 0.02))
    assert not list(differing_values(one, other, 0.02))
