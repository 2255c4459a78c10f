"""A stop on a disk without room for the save: a real process on a file system of 2 MiB."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from forked import completed
from harness import assert_same_bits
from rows import few
from started import Popen

JOB = """
import ctypes, os, signal, sys
from pathlib import Path
import torch
import forge

if len(sys.argv) > 4 and ctypes.CDLL(None).setns(os.open(sys.argv[4], os.O_RDONLY), 0):
    sys.exit("the namespace of the disk cannot be entered")
torch.set_num_threads(1)
torch.manual_seed(1)
disk, left = Path(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(300, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
policy = {"checkpoint": {"dir": str(disk / "job"), "every_steps": 2}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    run.on_stop(lambda: print("callback", flush=True))
    for step in run.steps(10):
        loss = model(torch.randn(4, 300)).square().mean()
        loss.backward()
        run.update(loss, optimizer)
        if step == 4 and run.resumed_from is None and left >= 0:
            (disk / "left").write_bytes(bytes(left))
            with open(disk / "ballast", "wb", buffering=0) as ballast:
                try:
                    while True:
                        ballast.write(bytes(4096))
                except OSError:
                    (disk / "left").unlink()
            os.kill(os.getpid(), signal.SIGTERM)
torch.save(model.state_dict(), sys.argv[3])
"""
HOLDER = 'mount -t tmpfs -o size=2m tmpfs "$1" && echo mounted && exec sleep 600'
"""Keeps a private namespace with the small disk, which each attempt enters."""


@pytest.mark.parametrize("left", few(1, [0, 16384]), ids=["not a byte", "room for a verdict"])
def test_a_stop_that_cannot_be_saved_ends_with_71_and_says_why(left, disk, tmp_path):
    """Exit code 143 would mean a saved stop; the next start uses the checkpoint before it.

    Only the steps since that checkpoint are repeated, with the bits of an undisturbed run.
    """
    command = ["unshare", "-m", "sh", "-c", HOLDER, "sh", disk]
    holder = Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "mounted\n"
    seen = Path("/proc", str(holder.pid), "root", *disk.parts[1:])

    def attempt():
        where = [str(disk), str(left), str(tmp_path / "cut.pt"), f"/proc/{holder.pid}/ns/mnt"]
        return completed(["-c", JOB, *where], tmp_path, joins_output=False)

    first = attempt()
    assert (first.returncode, first.stdout) == (71, "callback\n"), first.stderr
    assert "The state at step 5 could not be saved" in first.stderr
    assert "No space left on device" in first.stderr
    assert os.readlink(seen / "job/latest") == "step_4"
    assert not [name for name in os.listdir(seen / "job") if "tmp" in name]
    verdict = seen / "job/.forge/verdict.json"
    if left:
        found = json.loads(verdict.read_text())
        assert (found["exit_code"], found["step"]) == (71, 5)
        assert found["text"].startswith("SIGTERM, but The state at step 5 could not be saved")
    else:
        assert "Could not record why this process ends" in first.stderr
        assert not verdict.exists() or verdict.read_text() == ""
    (seen / "ballast").unlink()
    second = attempt()
    assert second.returncode == 0, second.stderr
    assert "resumes at step 4" in second.stderr

    whole = completed(["-c", JOB, str(tmp_path), "-1", str(tmp_path / "whole.pt")], tmp_path)
    assert whole.returncode == 0, whole.stdout
    cut, undisturbed = (torch.load(tmp_path / name) for name in ("cut.pt", "whole.pt"))
    assert_same_bits(cut, undisturbed)
