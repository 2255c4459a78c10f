"""Random generators of a loader, of its parts, or of objects that forge cannot see."""

import pytest
from rows import few

SCRIPT = "generators.py"


def test_a_generator_that_loader_and_loop_share_goes_on_for_both(stop_and_compare):
    """A resume repeats the loader's draw at the start of the epoch, but not the loop's draws."""
    stop_and_compare("step 13", SCRIPT, loop="shares")


def test_the_generator_of_a_sampler_inside_another_batch_sampler(stop_and_compare):
    """Accelerate divides the batches of a loader among ranks in such a way."""
    job = stop_and_compare("step 13", SCRIPT, loop="nested")
    assert "the order of a EverySecond: give it set_epoch" in job.output


@pytest.mark.parametrize("workers", few(1, [2, 0]))
def test_a_stateful_loader_with_a_generator(workers, stop_and_compare):
    """The loader's state has the position in this epoch, but not the order of the next one."""
    stop_and_compare("step 13", SCRIPT, loop="stateful", workers=workers)


@pytest.mark.parametrize("kind", few(2, ["persistent", "own", "plain", "stateful", "transformed"]))
def test_what_workers_draw_to_collate_a_seeded_batch_is_drawn_again(kind, stop_and_compare):
    """A resume does not load the batches before the stop again, so their draws must not matter.

    forge cannot save private generators ("own", "transformed"): it then loads all batches again.
    """
    job = stop_and_compare("step 13", SCRIPT, loop="mixes", kind=kind)
    assert "Not known to resume exactly" not in job.output
    assert ("forge.data.seeded does not seed" in job.output) is (kind in ("own", "transformed"))


INEXACT = {
    "sampler with random.Random": "the random generator of the OwnOrder",
    "dataset with numpy's": "the random generator of the OwnNoise",
    "seeded dataset with numpy's": "the random generator of the OwnNoise",
    "collate_fn with numpy's": "the random generator of the OwnMix",
}


@pytest.mark.parametrize("kind", INEXACT)
def test_private_generators_are_named_as_the_run_starts(kind, make_job, tmp_path):
    """forge cannot save these generators, so users must not believe that it does."""
    job = make_job(tmp_path / "job", script=SCRIPT, loop="keeps_to_itself", kind=kind)
    job.run_to_end()
    (line,) = [one for one in job.output.splitlines() if "Not known to resume exactly" in one]
    assert INEXACT[kind] in line
    assert job.output.index(line) > job.output.index("Training starts")


@pytest.mark.parametrize("kind", ["sampler with state", "dataset that is seeded"])
def test_what_follows_the_warnings_advice_is_exact_and_not_warned_of(kind, stop_and_compare):
    """The advice in the warning must work."""
    job = stop_and_compare("step 13", SCRIPT, loop="keeps_to_itself", kind=kind)
    assert "Not known to resume exactly" not in job.output
