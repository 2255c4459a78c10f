"""The parts of a job's time sum to the whole, whatever the ledgers say."""

import itertools
import random

import pytest

import forge
from forge.sweeps import times
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.times import Part, Segment


def attempt(number, began, ended, *events):
    return AttemptRecord(
        number, began, ended, events=[{"t": t, "kind": k, **more} for t, k, more in events]
    )


def test_a_stop_and_a_kill_are_accounted_by_use():
    """Queue, start-up, training, a save that waits, an evaluation, a stop, a pause, a repeat."""
    first = attempt(
        *(1, 10.0, 100.0),
        (11.0, "run", {}),
        (20.0, "start", {"step": 0, "previous_step": None, "summary": {}}),
        (25.0, "training", {}),
        (43.0, "save", {"began": 37.0, "waited": 3.0, "step": 9}),
        (60.0, "evaluation", {"seconds": 5.0, "step": 12}),
        (97.0, "stop", {"asked": 90.0, "step": 20}),
    )
    second = attempt(
        *(2, 130.0, None),
        (131.0, "run", {}),
        (140.0, "start", {"step": 9, "previous_step": 20, "summary": {}}),
        (145.0, "training", {}),
        (170.0, "caught_up", {"step": 21}),
    )
    found = times.segments([first, second], 0.0, 200.0, is_queued=True)
    assert found == [
        Segment(Part.queued, 0.0, 10.0, 0),
        Segment(Part.starting, 10.0, 25.0, 1),
        Segment(Part.productive, 25.0, 37.0, 1),
        Segment(Part.saving, 37.0, 40.0, 1),
        Segment(Part.productive, 40.0, 55.0, 1),
        Segment(Part.evaluating, 55.0, 60.0, 1),
        Segment(Part.productive, 60.0, 90.0, 1),
        Segment(Part.stopping, 90.0, 100.0, 1),
        Segment(Part.queued, 100.0, 130.0, 0),
        Segment(Part.starting, 130.0, 145.0, 2),
        Segment(Part.repeated, 145.0, 170.0, 2),
        Segment(Part.productive, 170.0, 200.0, 2),
    ]
    assert sum(times.totals(found).values()) == 200.0
    assert times.goodput(times.totals(found)) == pytest.approx((12 + 15 + 30 + 30 + 5) / 160)


def test_a_pause_of_a_local_job_is_idle_and_a_command_is_productive():
    """No scheduler has a queue there, and forge cannot see the steps of a command."""
    attempts = [attempt(1, 5.0, 9.0), attempt(2, 12.0, 20.0)]
    found = times.segments(attempts, None, 20.0, is_queued=False)
    parts = [(one.part, one.seconds) for one in found]
    assert parts == [(Part.productive, 4.0), (Part.idle, 3.0), (Part.productive, 8.0)]


def waited(draw, at):
    return {"began": at + draw.uniform(-10, 100), "waited": draw.uniform(0, 30)}


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_sum_to_the_whole_for_any_ledger(seed):
    """Clocks that are set back, events in any order, ends that nobody recorded."""
    draw = random.Random(seed)
    kinds = ["start", "training", "save", "evaluation", "caught_up", "stop", "run"]
    at, attempts = 0.0, []
    for number in range(1, draw.randrange(1, 6)):
        at += draw.uniform(-5, 50)
        events = [
            (
                at + draw.uniform(-10, 100),
                draw.choice(kinds),
                {"step": 3, "seconds": draw.uniform(0, 30), **waited(draw, at)}
                | draw.choice([{}, {"summary": {}, "previous_step": 7}]),
            )
            for _ in range(draw.randrange(12))
        ]
        ended = draw.choice([None, at + draw.uniform(0, 100)])
        attempts.append(attempt(number, at, ended, *events))
    found = times.segments(attempts, 0.0, 500.0, is_queued=draw.random() < 0.5)
    assert all(one.seconds > 0 for one in found)
    assert all(one.end == other.begin for one, other in itertools.pairwise(found))
    if found:
        whole = found[-1].end - found[0].begin
        assert sum(times.totals(found).values()) == pytest.approx(whole)


def test_a_sweep_that_was_disturbed_is_accounted_within_one_percent(swept):
    """Real ledgers: attempts that ended, raised, were killed, and were started again."""
    for job in forge.sweep(swept).jobs:
        own = job.history()
        found = times.segments(own, None, own[-1].ended, is_queued=False)
        sums = times.totals(found)
        assert sum(sums.values()) == pytest.approx(own[-1].ended - own[0].began, rel=0.01)
        assert sums[Part.starting] > 0
        assert sums[Part.productive] > 0
        assert (sums[Part.repeated] > 0) == (len(own) > 1)
        assert sums[Part.saving] > 0
