"""A job whose checkpoints were removed under it, as by a purge of a scratch disk."""

import shutil
import subprocess
import sys
from pathlib import Path

from forked import completed

APP = """
import os, signal
import forge, hydra, torch

@hydra.main(version_base=None, config_path=".", config_name="app")
def main(cfg):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    with forge.Run(cfg.resilience, model=model) as run:
        for step in run.steps(12):
            if step == 7 and os.environ.get("STOP"):
                os.kill(os.getpid(), signal.SIGTERM)
    print("DONE", run.resumed_from)

if __name__ == "__main__":
    main()
"""
CONFIG = (
    "defaults: [resilience: default, _self_]\nlr: 1\nresilience: {checkpoint: {every_steps: 5}}\n"
)


def app_in(folder):
    (folder / "app.py").write_text(APP)
    (folder / "app.yaml").write_text(CONFIG)
    return folder


def test_a_job_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(tmp_path):
    """It trained again from step 0 without a word, though its directory knew its last save."""
    folder = app_in(tmp_path)
    command = ["app.py", "hydra.run.dir=job"]
    assert completed(command, folder, STOP="1").returncode == 143
    shutil.rmtree(folder / "job" / "checkpoints")
    refused = completed(command, folder)
    assert refused.returncode == 74, refused.stdout
    assert f"has saved step 8 in {folder / 'job' / 'checkpoints'}, but no checkpoint" in (
        refused.stdout
    )
    assert completed(command, folder).returncode == 74
    lines = refused.stdout.splitlines()
    anew = next(n for n, line in enumerate(lines) if "To train again from step 0:" in line) + 1
    shell = subprocess.run(["sh", "-c", lines[anew]], cwd=folder, capture_output=True, text=True)
    assert shell.returncode == 0, shell.stdout + shell.stderr
    assert "DONE None" in shell.stdout
    assert (folder / "job" / ".forge" / "ledger_to_step_8").is_dir()


def test_a_sweep_says_that_the_checkpoints_of_a_job_are_gone(tmp_path):
    """Its launcher does not start the job again, and `forge status` gives the reason."""
    folder = app_in(tmp_path)
    command = ["app.py", "-m", "hydra/launcher=local", "hydra.sweep.dir=sweep", "lr=1"]
    completed(command, folder, STOP="1")
    (checkpoints,) = folder.glob("sweep/*/checkpoints")
    shutil.rmtree(checkpoints)
    again = completed(command, folder)
    assert again.returncode != 0
    assert again.stdout.count("has saved step 8 in") >= 1
    forge = str(Path(sys.executable).with_name("forge"))
    status = subprocess.run([forge, "status", "sweep"], cwd=folder, capture_output=True, text=True)
    assert "its checkpoint of step 8 is gone" in " ".join(status.stdout.split())
