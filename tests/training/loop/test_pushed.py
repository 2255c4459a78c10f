"""A loop that forge does not own calls `run.boundary`, and ends with the same bits all the same."""

import itertools
import random

import pytest
import torch
from harness import assert_same_run
from ranked import RankedJob
from torch.utils.data import DataLoader

import forge
from forge.jobdir import spawned

STEPS = 40
SPEC = {"script": "pushed.py", "loop": "trainer", "policy": {"checkpoint": {"every_steps": 3}}}
DRAWN = random.Random(7)
STRIKES = [
    (f"{place} {step}", name)
    for place, (step, name) in zip(
        itertools.cycle(["step", "end"]),
        [(DRAWN.randrange(1, STEPS), DRAWN.choice(["TERM", "KILL", "USR1"])) for _ in range(16)],
        strict=False,
    )
]
CODES = {"TERM": 143, "KILL": -9, "USR1": 75}


def starts(job):
    return [eval(line) for line in (job.directory / "starts.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    ("place", "name"),
    [*STRIKES, ("epoch 1", "KILL"), ("epoch 2", "TERM"), ("after", "KILL"), ("after", "TERM")],
)
def test_a_loop_of_somebody_else_s_ends_with_the_same_bits(
    place, name, tmp_path, make_job, undisturbed
):
    """Open accumulations, the mean of an epoch and the place in the data included."""
    job = make_job(tmp_path / "job", kill_at={place: name}, **SPEC)
    job.run_to_end(CODES[name])
    assert_same_run(job, undisturbed(**SPEC))
    if name != "KILL" and place != "after":
        assert job.steps_repeated == [0]


def test_begin_says_where_the_loop_begins_and_that_it_has_ended(tmp_path, make_job, undisturbed):
    job = make_job(tmp_path / "job", kill_at={"step 13": "TERM"}, **SPEC)
    job.run_to_end(143)
    assert starts(job) == [[0, 0, False, False], [14, 1, True, False]]
    assert job.run() == 0
    assert starts(job)[2:] == [[STEPS, 3, True, True]]
    assert_same_run(job, undisturbed(**SPEC))


def test_a_loader_that_reads_ahead_is_refused_at_the_first_boundary(tmp_path, make_job):
    """The batch in between would be lost at each resume."""
    job = make_job(tmp_path / "job", reads_ahead=True, **SPEC)
    assert job.run() == 78
    assert "loader: the loop has trained on 1 batches, but has taken 2" in job.output
    assert "trained on 2" not in job.output


def test_workers_are_placed_too(tmp_path, make_job, undisturbed):
    job = make_job(tmp_path / "job", workers=2, kill_at={"step 17": "TERM"}, **SPEC)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(workers=2, **SPEC))


def test_a_rollback_is_done_by_the_next_start(tmp_path, make_job):
    """No loop of somebody else's can go back."""
    nan = {"action": "rollback", "max_consecutive": 1}
    spec = SPEC | {"policy": SPEC["policy"] | {"nan": nan}, "bad": 25}
    job = make_job(tmp_path / "job", **spec)
    job.run_to_end(75)
    assert starts(job) == [[0, 0, False, False], [24, 2, True, False]]
    (rolled,) = [e for a in job.history.attempts for e in a.events if e["kind"] == "rollback"]
    assert (rolled["step"], rolled["first_bad"]) == (24, 25)
    assert "rollback to step 24, by a new start" in job.output


def test_finish_ends_it(tmp_path, make_job):
    job = make_job(tmp_path / "job", finish_at=9, **SPEC)
    assert job.run() == 0
    (attempt,) = job.history.attempts
    assert attempt.events[-1]["kind"] == "finish"
    assert attempt.events[-1]["step"] == 10


def test_ranks_stop_after_the_same_step_and_end_as_in_a_loop_over_steps(tmp_path):
    """One engine: the same bits as `run.steps`, on all ranks, though only one was signalled."""
    whole = RankedJob(tmp_path / "whole", 2, n=30)
    whole.run_to_end()
    job = RankedJob(tmp_path / "job", 2, n=30, pushed=True, signal=[[17, 1]])
    job.run_to_end([75, 75])
    job.assert_same_run(whole)


# -- misuse, and a disabled Run -------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(spawned, "owner", lambda: f"process {next(numbers)}")

    def make(**objects):
        return forge.Run({"checkpoint": {"dir": str(tmp_path / "ck"), "every_steps": 1}}, **objects)

    return make


def test_calls_that_cannot_be_meant_say_what_to_do(run):
    loader = forge.data.resumable(DataLoader(torch.arange(6.0), 2))
    one = run(loader=loader)
    with pytest.raises(forge.ForgeError, match="needs `with forge"):
        one.begin()
    with one:
        with pytest.raises(forge.ForgeError, match="call `start = run"):
            one.boundary(1, taken=0)
        one.begin()
        with pytest.raises(forge.ForgeError, match="call it once"):
            one.begin()
        for step in (0, True, 1.5):
            with pytest.raises(forge.ForgeError, match="expected the number of steps done"):
                one.boundary(step, taken=0)
        with pytest.raises(forge.Exit, match=r"of each loader given to forge.Run \(loader\)"):
            one.boundary(1)
        next(iter(loader))
        assert one.boundary(1, taken=1) is False
        with pytest.raises(forge.ForgeError, match="inside a step"):
            one.steps(3)
        one.end_loop("enough")
        one.end_loop("harmless")


def test_a_loop_cannot_become_one_of_the_other_kind(run):
    with run() as one:
        one.begin()
        one.boundary(1)
    for begin in (lambda r: next(r.steps(5)), lambda r: next(r.epochs(5))):
        with (
            pytest.raises(forge.StateMismatch, match=r"has a position in a loop with run.bound"),
            run() as one,
        ):
            begin(one)


def test_a_loop_over_steps_cannot_become_a_pushed_one(run):
    with run() as one:
        for _ in one.steps(5):
            pass
    with (
        pytest.raises(forge.StateMismatch, match=r"has a position in a loop over run.steps"),
        run() as one,
    ):
        one.begin()


def test_a_disabled_run_only_counts():
    seen = []
    with forge.Run({"enabled": False}) as one:
        one.every(2, at_end=True)(seen.append)
        assert [*one.begin()] == [0, 0, False, False]
        for step in range(1, 6):
            assert one.boundary(step, epoch=step // 3) is False
        assert (one.step, one.epoch) == (5, 1)
        one.end_loop()
    assert seen == [2, 4, 5]


def test_open_and_close_are_the_block(run):
    one = run().open()
    assert one.begin().step == 0
    one.boundary(1)
    one.close()
    with run() as again:
        assert again.begin() == (1, 0, True, True)


# -- the loader by itself -------------------------------------------------------------------------


def batches(loader, count):
    return [batch.tolist() for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_the_loader_continues_where_it_was(passes, taken):
    """In any loop, without a Run: with its state, and torch's random state."""

    def make():
        torch.manual_seed(3)
        return forge.data.resumable(DataLoader(torch.arange(9.0), 3, shuffle=True))

    whole, stopped = make(), make()
    expected = [batch.tolist() for _ in range(passes + 2) for batch in whole]
    torch.manual_seed(3)
    seen = [batch.tolist() for _ in range(passes) for batch in stopped]
    if taken:
        iterator = iter(stopped)
        seen += [next(iterator).tolist() for _ in range(taken)]
    state, drawn = stopped.state_dict(), torch.get_rng_state()
    resumed = make()
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert resumed.taken == passes * 3 + taken
    assert resumed.state_dict() == state
    while len(seen) < len(expected):
        seen += [batch.tolist() for batch in resumed]
    assert seen == expected
    assert len(resumed) == 3
