"""What a checkpoint's manifest says of logged values: a function of the steps that it holds."""

import math
import os
import signal

import pytest
import torch

import forge
from forge.checkpoint.format import manifest
from forge.jobdir import ledger
from forge.shutdown import stopping
from forge.training import metrics


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Attempts at one job; `hurt(run, step, place)` is called at places inside each step."""
    monkeypatch.setattr("forge.shutdown.stopping.leave", forge.Exit)

    def attempt(directory, hurt=lambda run, step, place: None, steps=20, every=5, **policy):
        torch.manual_seed(3)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        policy.setdefault("checkpoint", {}).update(
            {"dir": str(tmp_path / directory), "every_steps": 4, "keep_last": 99}
        )
        with forge.Run(policy, model=model, optimizer=optimizer) as run:

            @run.every(every)
            def evaluate(step):
                run.log(held_out=model.weight.detach().sum(), half=step / 2)
                hurt(run, step, "evaluated")

            for step in run.steps(steps):
                loss = model(torch.randn(4, 3)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                hurt(run, step, "end")

    yield attempt
    stopping.uninstall()


def told(folder):
    """step -> (metrics, logged_at) of every periodic checkpoint, read without its tensors."""
    found = [manifest.read(path) for path in folder.glob("step_*")]
    return {one.step: (one.metrics, one.logged_at) for one in found if one.step % 4 == 0}


def test_the_values_are_the_last_ones_and_the_same_however_often_a_run_is_stopped(
    trainer, tmp_path
):
    """The best checkpoint of a run that was preempted twice must be that of one that was not."""
    trainer("whole")
    whole = told(tmp_path / "whole")
    logged = {step: logged_at for step, (_, logged_at) in whole.items()}
    last = {8: 4, 12: 9, 16: 14, 20: 19}
    assert logged.pop(4) == {}
    assert logged == {step: {"held_out": at, "half": at} for step, at in last.items()}
    assert all(whole[step][0]["half"] == (at + 1) / 2 for step, at in last.items())

    def stop(at_step, at_place):
        def hurt(run, step, place):
            if (step, place) == (at_step, at_place):
                os.kill(os.getpid(), signal.SIGTERM)

        return hurt

    def crash(run, step, place):
        if step == 17:
            raise RuntimeError("the run's own")

    for hurt in (stop(3, "end"), stop(5, "evaluated"), stop(9, "end"), stop(15, "evaluated")):
        with pytest.raises(forge.Exit):
            trainer("cut", hurt)
        stopping.uninstall()  # the process would have ended
    with pytest.raises(RuntimeError):
        trainer("cut", crash)
    trainer("cut")
    assert told(tmp_path / "cut") == whole


def test_a_rollback_takes_back_what_was_logged_after(trainer, tmp_path):
    """A value of the time line that led to the NaN says nothing of the new one."""
    seen = []

    def hurt(run, step, place):
        if place == "end" and step in (9, 10) and step not in seen:
            seen.append(step)
            run.log(lucky=0.001)
            run.should_step(math.nan)

    nan = {"action": "rollback", "max_consecutive": 2}
    trainer("job", hurt, nan=nan, checkpoint={"best": {"metric": "lucky"}})
    assert seen == [9, 10]
    events = ledger.read(tmp_path / "job").attempts[0].events
    assert [event["step"] for event in events if event["kind"] == "rollback"] == [8]
    found = told(tmp_path / "job")
    assert sorted(found) == [0, 4, 8, 12, 16, 20]
    assert all("lucky" not in logged for logged, _ in found.values())


def test_logging_reads_nothing_back_until_a_save(trainer, monkeypatch):
    """A host synchronisation a step would cost more than the metric is worth."""
    reads = []
    to_host = metrics._to_host
    monkeypatch.setattr(metrics, "_MAX_AGE_S", 1e9)
    monkeypatch.setattr(metrics, "is_on_host", lambda value: False)
    monkeypatch.setattr(metrics, "_to_host", lambda some: reads.append(now[0]) or to_host(some))
    now = [0]

    def hurt(run, step, place):
        now[0] = step
        run.log(value=torch.tensor(1.0))

    trainer("job", hurt, steps=12, every=99)
    assert reads == [3, 7, 11]


@pytest.mark.parametrize("is_on_host", [True, False])
def test_what_was_logged_does_not_change_with_its_tensor(
    trainer, tmp_path, monkeypatch, is_on_host
):
    """A running mean is one tensor, logged in every step."""
    monkeypatch.setattr(metrics, "is_on_host", lambda value: is_on_host)
    total = torch.zeros(1)

    def hurt(run, step, place):
        if place == "end":
            run.log(total=total.fill_(step))

    trainer("job", hurt, steps=5, every=99)
    found = ledger.read(tmp_path / "job").metrics
    assert [found[step]["total"] for step in range(5)] == [0, 1, 2, 3, 4]
