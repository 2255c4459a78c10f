"""A sweep on a disk that becomes full: true jobs on a file system of 2 MiB of their own."""

import subprocess

import pytest
import torch
from sweeps import App

TRAIN = """
    import os, signal
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import forge

    if "FORGE_JOB_TOKEN" in os.environ:
        import torch

    def fill(disk):
        with open(disk / "ballast", "wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                pass

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = torch.nn.Linear(300, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step in run.steps(8):
                loss = model(torch.randn(4, 300)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                if step == 4 and run.resumed_from is None and cfg.disk is not None:
                    fill(Path(cfg.disk))
                    os.kill(os.getpid(), signal.SIGUSR1)
        torch.save(model.state_dict(), cfg.weights)

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    disk: null
    weights: ???
    resilience:
      checkpoint: {every_steps: 2}
      requeue: {no_progress_limit: 1}
"""
SWEEP = """
set -u
mount -t tmpfs -o size=2m tmpfs "$1"
(until grep -q "restart 1" "$2"; do sleep 0.1; done; rm "$1/ballast") &
shift 2
"$@"
"""


@pytest.fixture
def disk(tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(directory)]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs the right to mount in a private namespace (root)")
    return directory


def test_a_job_that_a_full_disk_stopped_resumes_once_there_is_room(disk, tmp_path):
    """Not a byte is left, for a verdict or a state either; and the older checkpoint is good."""
    app = App(tmp_path / "app", TRAIN, CONF)
    whole, cut, output = tmp_path / "whole.pt", tmp_path / "cut.pt", tmp_path / "said.txt"
    try:
        undisturbed = app.run(f"weights={whole}")
    finally:
        app.close()
    assert undisturbed.returncode == 0, undisturbed.stdout
    app.sweep_dir = disk / "sweep"
    command = app.command(f"weights={cut}", f"disk={disk}")
    with output.open("w") as file:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", SWEEP, "sh", disk, output, *command],
            cwd=app.folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=200,
        )
    said = output.read_text()
    assert done.returncode == 0, said
    assert "restart 1 at step 5 of 8 (62%): the disk is full" in said
    one, other = (torch.load(path, weights_only=True) for path in (whole, cut))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
