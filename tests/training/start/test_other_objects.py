"""A job that begins at step 0 again, with other objects than at its first start."""

import subprocess
import sys
from pathlib import Path

import pytest
import small_scripts
from forked import completed

OWN = """
import os, forge, torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
if os.path.exists("own.pt"):
    own = torch.load("own.pt")
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
policy = {"checkpoint": {"dir": "ck", "every_steps": EVERY, "every_s": None}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for epoch in run.epochs(4):
        for step, x in run.batches(range(5)):
            loss = (model(torch.randn(8, 4)) - x).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            strike(step)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "own.pt")
print(run.step)
"""
UNSEEDED = """
import forge, torch
torch.seed()
model = torch.nn.Linear(4, 1)
with forge.Run({"checkpoint": {"dir": "ck"}}, model=model) as run:
    for step in run.steps(5):
        strike(step)
print(run.step)
"""
SAID = "he objects differ from those of the first start"


def status(folder):
    forge = str(Path(sys.executable).with_name("forge"))
    shown = subprocess.run([forge, "status", "ck"], cwd=folder, capture_output=True, text=True)
    return " ".join(shown.stdout.split())


@pytest.mark.parametrize("text", [OWN.replace("EVERY", "100"), UNSEEDED], ids=["own", "unseeded"])
def test_a_second_start_from_other_objects_is_named_in_the_log_and_in_status(text, tmp_path):
    """It trained five epochs instead of four from its own weights, and nothing said so."""
    step = "8" if text != UNSEEDED else "2"
    killed = small_scripts.starts(tmp_path, text, f"{step}:KILL")
    assert [start.returncode for start in killed] == [-9, 0]
    assert SAID not in killed[0].stdout
    assert killed[1].stdout.count(SAID) == 1
    assert f"t{SAID}" in status(tmp_path)


def test_the_problem_stays_the_job_s_after_it_has_resumed(tmp_path):
    """The steps trained from the other objects are in all its later checkpoints."""
    text = OWN.replace("EVERY", "7")
    killed = small_scripts.starts(tmp_path, text, "6:KILL")
    assert SAID in killed[1].stdout
    longer = completed(["script.py"], tmp_path)
    assert SAID not in longer.stdout
    assert SAID in status(tmp_path)


def test_a_seeded_job_that_is_killed_early_begins_again_without_a_word(tmp_path):
    """The same objects: all that an early kill costs is the time."""
    text = UNSEEDED.replace("torch.seed()", "torch.manual_seed(0)")
    killed = small_scripts.starts(tmp_path / "early", text, "2:KILL")
    assert [start.returncode for start in killed] == [-9, 0]
    assert SAID not in killed[1].stdout
    assert SAID not in status(tmp_path / "early")
