"""Calls with swapped, forgotten or wrong arguments: each is named, with what to write instead."""

import math

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import forge
from forge.slurm import client

LOADER = torch.utils.data.DataLoader([torch.ones(2)] * 4)


class Job:
    """A model, an optimizer and a scaler, and Runs with them."""

    def __init__(self, directory):
        self.policy = {"checkpoint": {"dir": str(directory / "job")}}
        self.model = torch.nn.Linear(2, 1)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu")

    def run(self, **stateful):
        return forge.Run(self.policy, model=self.model, opt=self.opt, **stateful)

    def backward(self):
        loss = self.model(torch.ones(1, 2)).mean()
        loss.backward()
        return loss


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def job(request, tmp_path):
    """With resilience disabled, too, so that the mistakes show before they matter."""
    one = Job(tmp_path)
    one.policy["enabled"] = request.param
    return one


LOOPS = {
    "loader before n": (
        lambda run: run.steps(LOADER, 4),
        "expected the number of steps (a whole number, 0 or more) as the first argument, found a"
        " DataLoader. Write `for step, batch in run.steps(1000, loader):`",
    ),
    "text as n": (lambda run: run.steps("4"), "found '4'. Write `for step, batch in run.steps("),
    "flag as n": (lambda run: run.steps(True), "found True. Write `for step, batch in"),
    "below zero": (lambda run: run.steps(-1), "(a whole number, 0 or more)"),
    "a fraction": (lambda run: run.steps(2.5), "found 2.5. Write"),
    "no number": (lambda run: run.steps(math.nan), "found nan. Write"),
    "n as loader": (lambda run: run.steps(4, 32), "another iterable of batches, found 32"),
    "module as loader": (
        lambda run: run.steps(4, torch.nn.Linear(1, 1)),
        "found a Linear. Write `for step, batch in run.steps(1000, loader):`",
    ),
    "loader of epochs": (lambda run: run.epochs(LOADER), "found a DataLoader. Write `for epoch in"),
    "number of batches": (lambda run: run.batches(3), "found 3. Write `for step, batch in"),
    "every without parentheses": (
        lambda run: run.every(len),
        "expected a number of steps, found the function len. Write `@run.every(500)` above",
    ),
    "on_stop of a result": (
        lambda run: run.on_stop(print(end="")),
        "run.on_stop(): expected a function, found None. Give the function itself",
    ),
}


@pytest.mark.parametrize(("call", "complaint"), LOOPS.values(), ids=LOOPS)
def test_a_call_that_is_written_wrongly_is_answered_with_the_right_one(call, complaint, job):
    """`int object is not iterable` names neither the argument nor the expected value."""
    with pytest.raises(forge.ForgeError) as error, job.run() as run:
        call(run)
    assert complaint in str(error.value)


OUTSIDE = {
    "steps": lambda run: run.steps(4, LOADER),
    "epochs": lambda run: run.epochs(4),
    "batches": lambda run: run.batches(LOADER),
    "begin": lambda run: run.begin(),
    "boundary": lambda run: run.boundary(1),
    "should_step": lambda run: run.should_step(0.0),
    "check_stop": lambda run: run.check_stop(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_call_outside_the_block_is_refused(name, job):
    """A loop, for example, would begin again at each resume."""
    with pytest.raises(forge.ForgeError) as error:
        OUTSIDE[name](job.run())
    assert f"Run.{name}() needs `with forge.Run(...) as run:`" in str(error.value)


UPDATES = {
    "swapped": (
        lambda run, job, loss: run.update(job.opt, loss),
        "run.update(optimizer=…): this Tensor was not given to forge.Run",
    ),
    "optimizer of another model": (
        lambda run, job, loss: run.update(loss, type(job.opt)(torch.nn.Linear(2, 1).parameters())),
        "run.update(optimizer=…): this SGD was not given to forge.Run",
    ),
    "every inside a step": (
        lambda run, job, loss: run.every(5),
        "run.every() was called inside a step",
    ),
}


@pytest.mark.parametrize(("call", "complaint"), UPDATES.values(), ids=UPDATES)
def test_an_update_with_wrong_arguments_names_them(call, complaint, job):
    with job.run() as run:
        for _ in run.steps(1):
            loss = job.backward()
            with pytest.raises(forge.ForgeError) as error:
                call(run, job, loss)
    assert complaint in str(error.value)


RUNS = {
    "model for policy": (
        lambda job: forge.Run(job.model),
        "`resilience` is Linear(in_features=2, out_features=1, bias=True): expected a group of",
    ),
    "path for policy": (lambda job: forge.Run("conf.yaml"), "`resilience` is 'conf.yaml'"),
    "policy by name": (lambda job: forge.Run(policy={}), "the policy is the first argument"),
    "value": (lambda job: forge.Run(job.policy, best=0.1), "plain values belong in run.state"),
    "state dict": (
        lambda job: forge.Run(job.policy, model=dict(job.model.state_dict())),
        "forge.Run(model=…): a Tensor has no state_dict and load_state_dict",
    ),
    "loader": (
        lambda job: forge.Run(job.policy, loader=LOADER),
        "found a DataLoader. The loop saves the position in its data",
    ),
    "loader with a state": (  # restored twice, a pass of run.batches ended too early after a resume
        lambda job: forge.Run(job.policy, loader=StatefulDataLoader([torch.ones(2)] * 4)),
        "found a StatefulDataLoader. The loop saves the position in its data",
    ),
    "None": (lambda job: forge.Run(job.policy, ema=None), "forge.Run(ema=…): a NoneType has no"),
}


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize(("call", "complaint"), RUNS.values(), ids=RUNS)
def test_what_cannot_be_saved_is_named_before_anything_begins(call, complaint, job):
    """After code 78 a scheduler does not start the job again, as it does after a crash."""
    with pytest.raises(forge.Exit) as error:
        call(job)
    assert error.value.code == forge.ExitCode.BAD_CONFIG
    assert complaint in error.value.text


def test_a_network_can_be_called_policy(job):
    """As in reinforcement learning."""
    with forge.Run(job.policy, policy=job.model, opt=job.opt) as run:
        assert [step for step in run.steps(2)] == [0, 1]


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: {"inner": one}, lambda one: (one,)])
def test_a_value_that_contains_itself_is_named(wrap, job):
    value = []
    value.append(wrap(value))
    with pytest.raises(forge.CheckpointError, match=r"run\.state\.x contains itself"):
        job.run().state["x"] = value


def test_a_machine_without_slurm_says_where_to_submit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(forge.ForgeError, match=r"sbatch was not found: .* login node"):
        client.submit(tmp_path / "job.sh")
