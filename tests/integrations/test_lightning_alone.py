"""The table of docs/how-to/from-auto-requeue.md: what Lightning does without forge.

What it does with forge is in test_lightning.py, with the same script and the same signals.
"""

import pytest
import torch
from lightning_jobs import LightningJob

pytestmark = pytest.mark.proofs
SCRIPT = "datamodule"
AT, SAVE_STEPS = 17, 5
"""The batch in which a signal arrives, and the interval of Lightning's own checkpoints."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run."""
    job = LightningJob(tmp_path_factory.mktemp("whole"), SCRIPT, is_plain=True)
    job.run_to_end()
    return job


@pytest.mark.parametrize(("name", "code"), [("TERM", 0), ("USR1", -10), ("KILL", -9)])
def test_it_saves_nothing_and_resumes_with_other_bits(name, code, whole, tmp_path):
    """After SIGTERM it even exits as if the training were complete."""
    job = LightningJob(tmp_path, SCRIPT, is_plain=True, ckpt_path="last")
    job.run_to_end(({f"step {AT}": name}, code))
    assert not (whole.directory / "checkpoints").exists()
    assert job.num_repeated == AT + 1 - AT // SAVE_STEPS * SAVE_STEPS
    weights, others = job.final[0]["module"], whole.final[0]["module"]
    assert any(not torch.equal(weights[key], others[key]) for key in weights)
