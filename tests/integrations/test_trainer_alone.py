"""The table of docs/how-to/from-save-steps.md: what a Trainer without forge does.

What it does with forge is in test_transformers.py, with the same script and the same signals.
"""

import pytest
from repository import ROOT
from trained import Trained

pytestmark = pytest.mark.proofs
SCRIPT = ROOT / "tests" / "proofs" / "trainers" / "masked.py"
SAVE_STEPS = 5
BATCHES_A_STEP = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run."""
    run = Trained(tmp_path_factory.mktemp("whole"), SCRIPT, PLAIN="1")
    run.run_to_end()
    return run


@pytest.mark.parametrize(("name", "code"), [("TERM", -15), ("USR1", -10), ("KILL", -9)])
def test_it_ends_at_once_and_resumes_with_other_bits(name, code, whole, tmp_path):
    """Its collator draws masks for a batch that was read ahead, and the sums of losses are new."""
    run = Trained(tmp_path, SCRIPT, PLAIN="1")
    run.run_to_end(([{"step 17": name}], code))
    since = 17 - SAVE_STEPS * BATCHES_A_STEP
    assert len(run.losses) == len(whole.losses) + since
    assert [one for one in run.different_ends(whole) if ".model" in one]
    assert [one for one in run.different_ends(whole) if "history" in one]


def test_killed_in_a_save_it_cannot_resume(tmp_path):
    """The newest checkpoint is a directory without the Trainer's state."""
    run = Trained(tmp_path, SCRIPT, PLAIN="1")
    assert run.attempt({"own 2": "KILL"}) == [-9]
    assert run.attempt() == [1]
    assert "No such file or directory: 'trainer/checkpoint-10/trainer_state.json'" in run.output
