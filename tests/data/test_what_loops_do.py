"""What people's loops do around their steps: each is stopped once, and ends with the same bits."""

import pytest
from harness import assert_same_run


@pytest.fixture
def stop_and_compare(tmp_path, make_job, undisturbed):
    """Stop a loop of `loops.py` at a place, go on, and compare it with the undisturbed run."""

    def check(place, **spec):
        job = make_job(tmp_path / "job", script="loops.py", kill_at={place: "TERM"}, **spec)
        job.run_to_end(143)
        assert_same_run(job, undisturbed(script="loops.py", **spec))
        return job

    return check


REWOUND = pytest.mark.xfail(
    strict=True, reason="the loop after the checkpoint's puts its random state back once more"
)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("step 7", marks=REWOUND),
        pytest.param("poll between", marks=REWOUND),
        "step 8",
        "step 13",
    ],
)
def test_an_evaluation_between_two_loops(place, stop_and_compare):
    """It runs again at a resume; the second loop goes on with the random state it leaves."""
    job = stop_and_compare(place, loop="between")
    assert job.steps_repeated == [0]


@pytest.mark.parametrize("place", ["step 13", "poll 13"])
def test_a_batch_that_the_loop_takes_apart_is_saved_as_it_came(place, stop_and_compare):
    """`batch.pop("labels")` before the model is called with the rest."""
    stop_and_compare(place, loop="pops")


def test_a_generator_that_loader_and_loop_share_goes_on_for_both(stop_and_compare):
    """What the loader drew at the epoch's begin is drawn again, what the loop drew since is not."""
    stop_and_compare("step 13", loop="shares")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_with_a_generator(workers, stop_and_compare):
    """Its own state says where in the epoch it is, but not how the next one will be shuffled."""
    stop_and_compare("step 13", loop="stateful", workers=workers)


@pytest.mark.parametrize("step", [7, 8, 13])
def test_what_was_unfrozen_is_trained_on_after_a_resume(step, stop_and_compare):
    """The script freezes it at each start, and thaws it in one step that is not repeated."""
    job = stop_and_compare(f"step {step}", loop="unfreezes")
    assert [values["trained"] for values in job.history.metrics.values()] == [4] * 8 + [6] * 12


@pytest.mark.parametrize("place", ["poll 13 between", "poll 13 after"])
def test_two_updates_in_a_step_are_both_there_or_both_repeated(place, stop_and_compare):
    """A GAN's: between them the first is done, and its loss was computed before it was."""
    job = stop_and_compare(place, loop="gan")
    assert job.steps_repeated == [1]


BROKEN_OFF = pytest.mark.xfail(
    strict=True,
    reason="an error that leaves the loop is taken for a break: training counts as done",
)
DRAWN = pytest.mark.xfail(
    strict=True, reason="between two steps the random state of the last update is saved"
)


@pytest.mark.parametrize(
    "place",
    [
        "data 9",
        pytest.param("begin 9", marks=BROKEN_OFF),
        pytest.param("updated 9", marks=BROKEN_OFF),
        pytest.param("end 12", marks=BROKEN_OFF),
        pytest.param("end 13", marks=BROKEN_OFF),
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
        *(pytest.param(f"data {step}", marks=DRAWN) for step in (10, 13, 14)),
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


INEXACT = {
    "sampler with random.Random": "OwnOrder holds a random generator of its own",
    "dataset with numpy's": "OwnNoise holds a random generator of its own",
}


@pytest.mark.parametrize("kind", INEXACT)
def test_private_generators_are_named_as_the_run_starts(kind, make_job, tmp_path):
    """Nobody can save them from outside, so nobody may believe that they were saved."""
    job = make_job(tmp_path / "job", script="loops.py", loop="keeps_to_itself", kind=kind)
    job.run_to_end()
    (line,) = [one for one in job.output.splitlines() if "A resume is not exact here" in one]
    assert INEXACT[kind] in line
    assert job.output.index(line) > job.output.index("Training begins")


@pytest.mark.parametrize("kind", ["sampler with state", "dataset that is seeded"])
def test_what_follows_the_warnings_advice_is_exact_and_not_warned_of(kind, stop_and_compare):
    """The advice must work, or it is none."""
    job = stop_and_compare("step 13", loop="keeps_to_itself", kind=kind)
    assert "not exact" not in job.output
