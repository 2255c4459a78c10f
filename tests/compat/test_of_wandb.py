"""What forge needs of the files of Weights & Biases: see also `tests/proofs/test_loggers.py`."""

import sys
from pathlib import Path

import pytest
from contracts import contract

from forge.compat import of_wandb


@pytest.mark.proofs
def test_the_last_step_of_an_offline_run(tmp_path, monkeypatch):
    """Also of one that has more than a block of the file, and lost its end."""
    monkeypatch.syspath_prepend(str(Path(sys.prefix, "loggers")))
    import wandb

    with contract(of_wandb.last_step, of_wandb.records):
        run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
        for step in range(500):
            run.log({f"metric_{name}": step / 3 for name in range(20)}, step=step)
        run.finish()
        wandb.teardown()
        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert of_wandb.last_step(file) == 499
        content = file.read_bytes()
        assert len(content) > 1 << 15
        for size in (0, 3, 7, 1 << 14, 1 << 15, (1 << 15) + 3):
            file.write_bytes(content[:size])
            assert -1 <= of_wandb.last_step(file) < 499


def test_a_file_of_another_format_is_an_error(tmp_path):
    """Its steps would otherwise count as missing, and be sent a second time."""
    path = tmp_path / "run.wandb"
    path.write_bytes(b"another format")
    with pytest.raises(ValueError, match="found another format"):
        of_wandb.last_step(path)
