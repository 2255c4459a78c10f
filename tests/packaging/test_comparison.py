"""What README.md says of the alternatives: true of the versions that are installed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import submitit
import torch
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf


def build():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_a_handler_that_saves_where_it_strikes_saves_half_a_step():
    """The optimizer has stepped, the schedule has not: a state that no run is ever in."""
    saved = {}
    model, optimizer, schedule = build()

    def handler(*_):
        saved.update(weight=model.weight.detach().clone(), schedule=schedule.state_dict())

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            schedule.step()
            optimizer.zero_grad()
            if step == 1:
                after = model.weight.detach().clone()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert torch.equal(saved["weight"], after)  # two updates
    assert saved["schedule"]["last_epoch"] == 1  # but one step of the schedule


@pytest.mark.slow
def test_submitit_ignores_sigterm(tmp_path):
    """Slurm announces a preemption with it; often nothing else comes before SIGKILL."""

    def terminate_myself():
        os.kill(os.getpid(), signal.SIGTERM)
        return "trained on"

    job = submitit.LocalExecutor(tmp_path).submit(terminate_myself)
    assert job.result() == "trained on"
    assert "Bypassing signal SIGTERM" in job.stderr()


@pytest.mark.slow
def test_submitit_starts_no_killed_job_again(tmp_path):
    """A process that is gone cannot call what would resubmit it."""

    def kill_myself():
        with (tmp_path / "starts").open("a") as file:
            file.write("one\n")
        os.kill(os.getpid(), signal.SIGKILL)

    job = submitit.LocalExecutor(tmp_path).submit(kill_myself)
    assert job.exception() is not None
    assert (tmp_path / "starts").read_text() == "one\n"


def test_hydra_s_submitit_launcher_requeues_a_job_without_its_training():
    """What it resubmits is the launcher and the overrides that the job was first started with."""
    launcher = SlurmLauncher(**OmegaConf.create({"submitit_folder": "logs"}))
    again = launcher.checkpoint(["lr=1"], "hydra.sweep.dir", 0, "id", {})
    assert again.function is launcher
    assert again.args == (["lr=1"], "hydra.sweep.dir", 0, "id", {})


LIGHTNING = Path(sys.prefix) / "lightning" / "site-packages"
SCRIPT = """
import json, os, signal, sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, index):
        self.seen += batch[0].int().flatten().tolist()
        if self.global_step == int(os.environ.get("STOP_AT", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

pl.seed_everything(0)
model = Model()
loader = DataLoader(TensorDataset(torch.arange(40.0)[:, None]), batch_size=4, shuffle=True)
saves = pl.callbacks.ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[saves])
try:
    trainer.fit(model, loader, ckpt_path=os.environ.get("RESUME"))
finally:
    weight = model.layer.weight.item()
    print("\\n" + json.dumps([trainer.global_step, model.seen, weight]))
"""


def lightning(folder, **env):
    """(steps done, samples seen, weight) of a run of the script above."""
    if not LIGHTNING.exists():
        pytest.skip("Lightning is installed by `make proofs`")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(LIGHTNING), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.proofs
def test_lightning_stops_on_sigterm_without_saving(tmp_path):
    """What it has is the last periodic checkpoint; the exit code is that of a run that finished."""
    steps, _, _ = lightning(tmp_path, STOP_AT="4")
    assert steps == 5
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0-step=3.ckpt"]


@pytest.mark.proofs
def test_lightning_repeats_batches_when_it_resumes_in_mid_epoch(tmp_path):
    """With a plain shuffling DataLoader: some samples twice, others never, and other weights."""
    _, whole, expected = lightning(tmp_path)
    assert sorted(whole) == list(range(40))
    _, rest, found = lightning(tmp_path, RESUME="saved/epoch=0-step=3.ckpt")
    assert sorted(whole[:12] + rest) != sorted(whole)
    assert expected != found


@pytest.mark.proofs
def test_lightning_reads_a_flipped_bit_silently(tmp_path):
    """Its checkpoints are files of torch.save."""
    lightning(tmp_path)
    path = tmp_path / "saved" / "epoch=0-step=9.ckpt"
    weight = torch.load(path, weights_only=False)["state_dict"]["layer.weight"]
    raw = bytearray(path.read_bytes())
    raw[raw.index(weight.numpy().tobytes()) + 2] ^= 0x10
    path.write_bytes(raw)
    steps, _, _ = lightning(tmp_path, RESUME=str(path))
    assert steps == 10
