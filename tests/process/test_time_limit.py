"""When a run stops for its time limit by itself: the end, what still fits, what is handed on.

No test sleeps: the clock is injected.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from plans import planned

from forge.job import deadline
from forge.process import time_limit
from forge.process.time_limit import RECENT_STEPS, Recent, TimeLimit
from forge.training.saver import Saver

NOON = 1_800_000_000.0
PLAN = planned(actions={"USR2": "requeue"}, signal="USR2", warning_s=120.0, timeout_s=90.0)


class Clock:
    """Monotonic and wall clock of a process, moved by hand."""

    def __init__(self):
        self.monotonic_s, self.unix_s = 500.0, NOON

    def pass_s(self, seconds):
        self.monotonic_s += seconds
        self.unix_s += seconds

    def limit(self, left_s=100.0, stop_s=40.0, folder=None, **environment):
        environment = environment or {"FORGE_END_TIME": str(self.unix_s + left_s)}
        return TimeLimit(environment, stop_s, lambda: self.monotonic_s, lambda: self.unix_s, folder)

    def step(self, limit, seconds, save_s=2.0):
        """One step, after a boundary; whether another may follow."""
        self.pass_s(seconds)
        limit.end_interval()
        may_follow = limit.allows_step(save_s)
        limit.begin_interval()
        return may_follow


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told(monkeypatch):
    """What people are warned of."""
    found = []
    monkeypatch.setattr(time_limit.messages, "warn", found.append)
    return found


# -- when it ends ------------------------------------------------------------------------------


def test_without_an_end_time_there_is_no_limit(clock):
    """Most jobs of one machine have none."""
    limit = clock.limit(OTHER="1")
    assert clock.step(limit, 0)
    assert clock.step(limit, 1e9, save_s=1e9)


@pytest.mark.parametrize(
    ("environment", "left_s", "warnings"),
    [
        ({"FORGE_END_TIME": f"{NOON + 60.5}", "SLURM_JOB_END_TIME": f"{NOON + 9:.0f}"}, 60.5, 0),
        ({"SLURM_JOB_END_TIME": f"{NOON + 9:.0f}"}, 9, 0),
        ({"FORGE_END_TIME": "", "SLURM_JOB_END_TIME": f"{NOON + 9:.0f}"}, 9, 0),
        ({"FORGE_END_TIME": "12:30", "SLURM_JOB_END_TIME": f"{NOON + 9:.0f}"}, 9, 1),
        ({"FORGE_END_TIME": "tomorrow"}, float("inf"), 1),
        ({"FORGE_END_TIME": "nan"}, float("inf"), 1),
        ({"FORGE_END_TIME": "inf"}, float("inf"), 1),
        ({"SLURM_JOB_END_TIME": "0"}, float("inf"), 1),
        ({"SLURM_JOB_END_TIME": f"{NOON - 3600:.0f}"}, float("inf"), 1),
        ({"FORGE_END_TIME": f"{NOON - 1}"}, float("inf"), 1),
    ],
)
def test_the_end_is_the_wrapper_s_or_slurm_s_and_nonsense_is_named(
    environment, left_s, warnings, clock, told
):
    """An end in the past is somebody else's: heeded, it would stop the job after every step."""
    assert clock.limit(**environment).left_s == left_s
    assert len(told) == warnings


def test_a_clock_that_is_set_changes_nothing(clock):
    """NTP corrects a node by an hour: no job stops for it, and none is late."""
    limit = clock.limit(100)
    assert clock.step(limit, 0)
    clock.unix_s += 3600
    assert clock.step(limit, 5)
    clock.unix_s -= 7200
    assert clock.step(limit, 5)
    assert limit.left_s == 90
    assert not clock.step(limit, 75)


# -- what fits ---------------------------------------------------------------------------------


def test_it_stops_where_the_longest_recent_step_a_save_and_the_margin_do_not_fit(clock):
    """And not one step earlier: a signal that does come has the first word."""
    limit = clock.limit(100)  # the margin is 10 s
    assert clock.step(limit, 0)
    assert clock.step(limit, 5, save_s=2)
    while clock.step(limit, 3, save_s=2):
        assert limit.left_s > 5 + 2 + 10
    assert limit.left_s == 5 + 2 + 10


@pytest.mark.parametrize(("stop_s", "margin_s"), [(90, 10), (4, 1), (0.1, 0.5)])
def test_the_margin_follows_the_time_that_the_policy_gives_to_a_stop(stop_s, margin_s, clock):
    """With a lead of seconds, a margin of ten would always come before the signal."""
    limit = clock.limit(100, stop_s)
    clock.pass_s(100 - margin_s - 2 - 0.01)
    assert not limit.is_near(2)
    clock.pass_s(0.02)
    assert limit.is_near(2)


def test_the_first_step_is_always_done(clock):
    """Else a limit shorter than a step would be a job that starts forever and does nothing."""
    limit = clock.limit(1)
    assert clock.step(limit, 0, save_s=60)
    assert not clock.step(limit, 30, save_s=60)


def test_a_step_that_was_long_once_is_forgotten(clock):
    """The first one compiles; a suspended process seems to have taken an hour for one."""
    limit = clock.limit(10_000)
    assert clock.step(limit, 0)
    assert clock.step(limit, 3600)
    for _ in range(2 * RECENT_STEPS):
        assert clock.step(limit, 1)
    clock.pass_s(5000)
    limit.begin_interval()
    assert clock.step(limit, 1)  # 3600 s would not fit any more


def test_a_process_that_was_suspended_beyond_its_end_stops_at_once(clock):
    """It may be killed any moment; what it can still save it saves."""
    limit = clock.limit(1000)
    assert clock.step(limit, 0)
    assert not clock.step(limit, 2000)


def test_a_save_within_a_boundary_is_no_part_of_the_step(clock):
    """It would count twice: a minute early for every minute that a save takes."""
    limit = clock.limit(100)
    assert clock.step(limit, 0)
    limit.end_interval()
    clock.pass_s(30)  # the periodic save
    assert limit.allows_step(30)
    limit.begin_interval()
    assert clock.step(limit, 1, save_s=30)
    assert clock.step(limit, 20, save_s=18)
    assert not clock.step(limit, 1, save_s=18)


@pytest.mark.parametrize(("extended_s", "more_s"), [(600, 600), (-30, 0), (0, 0)])
def test_an_end_that_was_moved_is_heeded_before_a_stop(extended_s, more_s, clock, tmp_path):
    """An administrator extends the limit for a job that has nearly finished."""
    limit = clock.limit(100, folder=tmp_path)
    assert clock.step(limit, 0)
    (tmp_path / time_limit.MOVED).write_text(f"{clock.unix_s + 100 + extended_s:.3f}\n")
    clock.pass_s(95)
    assert limit.is_near(2) == (more_s == 0)
    clock.pass_s(more_s)
    assert limit.is_near(2)


@pytest.mark.parametrize("content", ["", "nonsense", None])
def test_a_file_that_says_nothing_of_the_end_moves_nothing(content, clock, tmp_path):
    """A full disk cuts it."""
    if content is not None:
        (tmp_path / time_limit.MOVED).write_text(content)
    limit = clock.limit(100, folder=tmp_path)
    assert clock.step(limit, 0)
    assert not clock.step(limit, 95)


@pytest.mark.parametrize(
    ("left_s", "is_too_soon"),
    [(3600, False), (131, False), (129, True), (42, True), (40.5, False), (30, False)],
)
def test_an_announcement_that_comes_early_is_told_from_one_by_hand(
    left_s, is_too_soon, clock, tmp_path
):
    """Slurm's may come a minute before its time, of which the run makes use."""
    assert clock.limit(left_s, folder=tmp_path).is_too_soon(40) == is_too_soon
    slurm_s = {"SLURM_JOB_END_TIME": str(clock.unix_s + left_s)}
    assert not clock.limit(folder=tmp_path, **slurm_s).is_too_soon(40)


def test_once_near_it_stays_near(clock):
    """Whoever asked the loop to come to the step's end has to be followed by the stop there."""
    limit = clock.limit(100)
    assert clock.step(limit, 0)
    assert limit.is_near(save_s=90)
    assert limit.is_near(save_s=0)
    assert not clock.step(limit, 1, save_s=0)


def test_recent_is_an_estimate_until_something_was_measured():
    """Between the last `num` and twice as many."""
    recent = Recent(2, at_first=60.0)
    assert recent.longest == 60
    recent.add(5)
    assert recent.longest == 5
    for seconds, longest in ((1, 5), (2, 5), (3, 5), (1, 3), (1, 3), (1, 1)):
        recent.add(seconds)
        assert recent.longest == longest


def test_a_save_beside_training_has_to_be_waited_for_first(tmp_path):
    """Both have to fit: the one that is under way, and that of the stop."""
    config = SimpleNamespace(every_s=None)
    saver = Saver(SimpleNamespace(), config, SimpleNamespace(sync=None), None, None)
    saver.expect(200_000_000)
    assert saver.cost_s == 4.0  # 1 s, and the weights with two moments at 200 MB/s
    saver.costs.add(1.5)
    assert saver.cost_s == 1.5

    class Alive:
        def is_alive(self):
            return True

    saver._thread = Alive()
    assert saver.cost_s == 3.0


# -- what a wrapper hands on -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "environment", "left_s"),
    [
        # A process that ignores the signal counts as hanging: the supervisor kills it after 90 s.
        ({}, {}, 3600 - 30),
        ({"timeout_s": 0}, {}, 3600),
        ({"actions": {"USR2": "save"}}, {}, 3600),
        ({"actions": {}, "warning_s": 0.0}, {}, 3600),
        ({}, {"SLURM_JOB_END_TIME": "100"}, 100),
        ({}, {"FORGE_END_TIME": "100", "SLURM_JOB_END_TIME": "7"}, 100),
        ({}, {"FORGE_END_TIME": "5000"}, 3600 - 30),
    ],
)
def test_a_wrapper_hands_on_when_it_or_an_outer_job_kills(plan, environment, left_s, monkeypatch):
    """A sweep inside a Slurm job ends with that."""
    monkeypatch.setattr(time_limit.time, "time", lambda: NOON)
    environment = {name: str(NOON + float(value)) for name, value in environment.items()}
    found = deadline.env_for_child(3600, replace(PLAN, **plan), environment)
    assert float(found["FORGE_END_TIME"]) == NOON + left_s


def test_a_wrapper_without_a_limit_hands_nothing_on():
    """What it has from outside is handed on anyway."""
    assert deadline.env_for_child(None, PLAN, {"FORGE_END_TIME": "5"}) == {}
