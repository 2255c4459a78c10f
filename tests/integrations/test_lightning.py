"""Lightning's Trainer under `ForgeCallback`; many more places are hit in `make proofs`."""

import pytest
from lightning_jobs import LightningJob


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run of a script."""
    done = {}

    def whole(script):
        if script not in done:
            done[script] = LightningJob(tmp_path_factory.mktemp(script), script)
            done[script].run_to_end()
        return done[script]

    return whole


@pytest.mark.parametrize("script", ["automatic", "stream"])
def test_forge_changes_nothing(script, whole, tmp_path):
    """The same bits as without forge, which somebody adds for its restarts alone."""
    plain = LightningJob(tmp_path, script, is_plain=True)
    plain.run_to_end()
    assert plain.different_ends(whole(script)) == []


@pytest.mark.parametrize(
    ("script", "attempts"),
    [
        ("automatic", [({"step 20": "TERM"}, 143), ({"validation 3": "USR1"}, 75)]),
        ("stream", [({"step 17": "TERM"}, 143), ({"step 29": "KILL"}, -9)]),
        ("combined", [({"step 12": "USR1"}, 75)]),
    ],
)
def test_a_stopped_training_ends_with_the_same_bits(script, attempts, whole, tmp_path):
    """Weights, optimizer, schedules, callbacks, logged values and the next random numbers."""
    job = LightningJob(tmp_path, script)
    job.run_to_end(*attempts)
    assert job.differences(whole(script)) == []
    if all(code != -9 for _, code in attempts):
        assert job.num_repeated == 0
