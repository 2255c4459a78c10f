"""Output that nobody reads: a full pipe blocks Hydra's logging, but neither save nor exit."""

import os
import signal
import sys

import pytest
from harness import full_pipe, wait_for
from hydra_apps import App
from started import Popen

from forge.jobdir import ledger


@pytest.mark.slow
def test_a_job_whose_log_nobody_reads_saves_and_ends_with_its_code(tmp_path):
    """`python train.py | less`, and the reader scrolls no further."""
    app = App(tmp_path / "app")
    config = app.folder / "train.yaml"
    config.write_text(config.read_text().replace("steps: 8", "steps: 100000000"))
    reader, writer = full_pipe()
    process = Popen(
        [sys.executable, "train.py", "hydra.run.dir=job"],
        cwd=app.folder,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    try:
        wait_for(
            lambda: (ledger.read_progress(app.folder / "job") or (0, 0))[1] >= 1, process, "a step"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 143
    finally:
        os.close(reader)
    assert (app.folder / "job/checkpoints/latest").exists()
