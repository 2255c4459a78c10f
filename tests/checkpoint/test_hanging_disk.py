"""A disk that hangs: training continues beside an asynchronous save, and a stop has an end."""

import os
import signal
import subprocess
import sys

import pytest
import warm
from torture import scenario

from forge.jobdir import ledger

JOB = """
import sys, threading, time
from pathlib import Path
import torch
import forge
from torture.calls import CHANGES, WRITES, Interception

torch.set_num_threads(1)
directory, kind = Path(sys.argv[1]), sys.argv[2]
released, stopped = directory.with_name("released"), directory.with_name("stopped")
armed, is_hanging = threading.Event(), threading.Event()

def hang(call):
    is_beside = threading.current_thread() is not threading.main_thread()
    is_meant = call.name == kind or (kind == "data" and call.name in WRITES)
    is_meant |= kind == "fence" and call.path.endswith(".fence.json")
    if armed.is_set() and is_beside and is_meant:
        is_hanging.set()
        while not released.exists():
            time.sleep(0.01)
    return call.make()

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
policy = {
    "checkpoint": {"dir": str(directory), "every_steps": 4, "every_s": None, "async_save": True},
    "shutdown": {"timeout_s": 2.0},
}
with Interception(directory, hang, (*CHANGES, "open")):
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(14):
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            if step == 7:
                while any(one.name == "forge-save" for one in threading.enumerate()):
                    time.sleep(0.01)  # step 4 is saved
                armed.set()
            if step == 8:
                print("hangs" if is_hanging.wait(60) else "does not hang", flush=True)
            if step == 10:
                print("trains on", flush=True)
                while not (released.exists() or stopped.exists()):
                    time.sleep(0.01)
print("finished", flush=True)
"""
"""Step 8 is saved beside training, which hangs; the save at step 12 would have to wait for it."""

KINDS = ["data", "fsync", "rename", "fence"]


@pytest.fixture
def hang(tmp_path):
    """A job whose save beside training hangs in one kind of call."""

    paths = [os.environ.get("PYTHONPATH"), *sys.path]

    def start(kind):
        with (tmp_path / "errors.txt").open("w") as errors:
            process = warm.Popen(
                [sys.executable, "-c", JOB, str(tmp_path / "job"), kind],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        assert process.stdout.readline() == "hangs\n", (tmp_path / "errors.txt").read_text()
        assert process.stdout.readline() == "trains on\n"
        return process

    return start


def newest_step(directory):
    store = scenario.open_store(directory)
    found = store.newest()
    assert store.passed_over == []
    store.close()
    return found.manifest.step


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_while_the_disk_hangs_and_a_stop_is_forced(kind, hang, tmp_path):
    """A stop that waits for a dead file server forever keeps the node from everybody."""
    process = hang(kind)
    process.send_signal(signal.SIGTERM)
    (tmp_path / "stopped").touch()
    assert process.wait(60) == 70
    assert newest_step(tmp_path / "job") == 4


def test_a_disk_that_comes_back_costs_nothing(hang, tmp_path):
    """The save that hung is completed, those after it as well."""
    process = hang("fsync")
    (tmp_path / "released").touch()
    assert process.wait(60) == 0
    assert process.stdout.readline() == "finished\n"
    assert newest_step(tmp_path / "job") == 14
    (attempt,) = ledger.read(tmp_path / "job").attempts
    saved = [event["step"] for event in attempt.events if event["kind"] == "save"]
    assert saved == [4, 8, 12, 14]
