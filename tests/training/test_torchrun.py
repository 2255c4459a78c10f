"""The script of docs/how-to/several-ranks.md under torchrun, typed as the page says."""

import os
import signal
import sys

import pytest
import readme
from harness import Process, assert_same_bits
from repository import ROOT

import forge
from forge.jobdir import ledger

PAGE = ROOT / "docs/how-to/several-ranks.md"


def start(folder):
    """In a folder of its own; its port is its own, as two tests may run at a time."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(readme.blocks("python", PAGE)[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run"]  # what the command of that name runs
    command = [*torchrun, "--standalone", "--nproc-per-node=2"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return Process([*command, "train.py"], folder / "output.txt", folder, **environment)


def weights(folder):
    found = forge.load(folder)
    assert found.manifest.is_complete
    return found.state["live"]["states"]["model"]


@pytest.mark.proofs
@pytest.mark.slow
def test_the_script_of_the_page_stops_and_goes_on_with_the_same_bits(tmp_path):
    """The agent passes SIGTERM on to both ranks, and what they end with is lost in its own code."""
    assert "`torchrun --nproc-per-node=2 train.py`" in PAGE.read_text()
    whole = start(tmp_path / "whole")
    assert whole.wait() == 0, whole.output
    stopped = start(tmp_path / "stopped")

    def has_begun():
        progress = ledger.read_progress(tmp_path / "stopped/checkpoints")
        return progress is not None and progress.step > 20

    stopped.wait_for(has_begun, "step 20")
    stopped.signal(signal.SIGTERM)
    assert stopped.wait() != 0
    assert "stopped by SIGTERM at step" in stopped.output
    assert stopped.is_session_gone()
    again = start(tmp_path / "stopped")
    assert again.wait() == 0, again.output
    assert "Training resumes at step" in again.output
    assert_same_bits(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
