"""The epoch of a sampler is the script's, as without forge; forge sets it in `run.steps` alone."""

import pytest
import small_scripts

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, DistributedSampler

CALL = {call!r}
torch.manual_seed(0)
data = list(range(12))
sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
loader = DataLoader(data, 4, sampler=sampler)
model = torch.nn.Linear(1, 1)
seen = []

def begin(epoch):
    if CALL == "from 1":
        sampler.set_epoch(epoch + 1)
    elif CALL == "every other":
        sampler.set_epoch(epoch // 2)

{loop}
print(seen)
"""
PLAIN = """
for epoch in range(4):
    begin(epoch)
    for batch in loader:
        seen += batch.tolist()
"""
CONVERTED = """
import forge
policy = {"checkpoint": {"dir": "ck", "every_steps": 1, "every_s": None}}
with forge.Run(policy, model=model) as run:
    run.state["seen"] = seen
    for epoch in run.epochs(4):
        begin(epoch)
        for step, batch in run.batches(loader):
            run.state["seen"] += batch.tolist()
            strike(step)
seen = run.state["seen"]
"""
OWN = """
import forge
policy = {"checkpoint": {"dir": "ck", "every_steps": 1, "every_s": None}}
resumable = forge.data.resumable(loader)
with forge.Run(policy, model=model, loader=resumable) as run:
    run.state["seen"] = seen
    start = run.begin()
    step = start.step
    for epoch in range(start.epoch, 4) if not start.is_finished else ():
        begin(epoch)
        for batch in resumable:
            run.state["seen"] += batch.tolist()
            strike(step)
            step += 1
            run.boundary(step, epoch=epoch + (step % 3 == 0), taken=step)
    run.end_loop()
seen = run.state["seen"]
"""


@pytest.mark.parametrize("loop", [CONVERTED, OWN], ids=["epochs", "own loop"])
@pytest.mark.parametrize("call", ["never", "from 1", "every other"])
def test_a_converted_script_trains_on_the_batches_of_the_plain_one(call, loop, tmp_path):
    """MAE counts epochs from 1, other scripts never call `set_epoch`: forge overruled both."""
    (plain,) = small_scripts.starts(tmp_path / "plain", SCRIPT.format(call=call, loop=PLAIN))
    text = SCRIPT.format(call=call, loop=loop)
    (whole,) = small_scripts.starts(tmp_path / "whole", text)
    assert small_scripts.last_line(whole) == small_scripts.last_line(plain)
    killed = small_scripts.starts(tmp_path / "killed", text, "7:KILL")
    assert [start.returncode for start in killed] == [-9, 0]
    assert small_scripts.last_line(killed[1]) == small_scripts.last_line(plain)


def test_an_epoch_that_was_set_after_the_pass_before_is_put_back(tmp_path):
    """A resumed job does not run that code again: the epoch is part of the saved position."""
    plain = PLAIN + "    sampler.set_epoch(epoch + 1)\n"
    (plain_end,) = small_scripts.starts(tmp_path / "plain", SCRIPT.format(call="after", loop=plain))
    every = "    run.every(epochs=1)(lambda step: sampler.set_epoch(run.epoch + 1))\n"
    loop = CONVERTED.replace("    for epoch in run.epochs", f"{every}    for epoch in run.epochs")
    killed = small_scripts.starts(
        tmp_path / "killed", SCRIPT.format(call="after", loop=loop), "7:KILL"
    )
    assert [start.returncode for start in killed] == [-9, 0]
    assert small_scripts.last_line(killed[1]) == small_scripts.last_line(plain_end)


def test_an_order_that_is_the_same_in_two_passes_is_named_once(tmp_path):
    """Half of all training scripts forget to call `set_epoch`."""
    (never,) = small_scripts.starts(tmp_path / "1", SCRIPT.format(call="never", loop=CONVERTED))
    assert never.stdout.count("has the same epoch (0) in two passes") == 1
    (counted,) = small_scripts.starts(tmp_path / "2", SCRIPT.format(call="from 1", loop=CONVERTED))
    assert "in two passes" not in counted.stdout
