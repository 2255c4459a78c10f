"""A training loop in this process, whose badness, stops and data can be chosen and looked at."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import forge
from forge.jobdir import ledger
from forge.process import processes
from forge.shutdown import stopping


@contextmanager
def outliving() -> Iterator[None]:
    """A stop starts a guard that ends the process ten seconds later; here it lives, and so do
    its children."""
    on_child = signal.getsignal(signal.SIGCHLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "_start_guard", lambda *_: None)
        patch.setattr(processes, "end_descendants", lambda job, save_s: 0)
        try:
            yield
        finally:
            stopping.uninstall()
            signal.signal(signal.SIGCHLD, on_child)


class Killed(Exception):
    """Stands for SIGKILL: nothing is saved on the way out."""


@dataclass
class Outcome:
    """The results of one attempt."""

    code: int = 0
    text: str = ""
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    """(step, indices of the samples) of every iteration."""
    updated: list[bool] = field(default_factory=list)
    """The return values of `run.update`."""
    state: dict[str, Any] = field(default_factory=dict)
    """Model, optimizer and schedule at the end."""

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.seen]

    @property
    def batches(self) -> list[list[int]]:
        return [indices for _, indices in self.seen]


def stop(_run: Any = None) -> None:
    """A signal as Slurm sends it; taken in at the next boundary."""
    os.kill(os.getpid(), signal.SIGTERM)


def kill(_run: Any = None) -> None:
    raise Killed


def train(
    directory: Path,
    *,
    steps: int = 16,
    bad: Callable[[int, int, list[int]], bool] = lambda visit, step, indices: False,
    spoil: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] = lambda model, loss: (
        loss * torch.nan
    ),
    at: dict[int, Callable[[Any], None]] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.01),
    schedule: Callable[..., Any] | None = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95),
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    form: str = "update",
    every_steps: int | None = 1,
    keep_last: int = 50,
    **nan: Any,
) -> Outcome:
    """One attempt. `bad(visit, step, indices)` tells which iterations `spoil` spoils; `at` acts
    in the iteration of that number (`visit`), after the update."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    points = [(i, torch.randn(3)) for i in range(20)]
    loader = DataLoader(points, batch_size=2, shuffle=True)
    adam = optimizer(model.parameters())
    rates = schedule(adam) if schedule is not None else None
    stateful = {"model": model, "optimizer": adam, "schedule": rates, "scaler": scaler}
    policy = {
        "nan": nan,
        "checkpoint": {
            "dir": str(directory),
            "every_steps": every_steps,
            "every_s": None,
            "keep_last": keep_last,
        },
    }
    outcome = Outcome()
    try:
        with forge.Run(policy, **{k: v for k, v in stateful.items() if v is not None}) as run:
            for step, (indices, x) in run.steps(steps, loader):
                visit = len(outcome.seen)
                outcome.seen.append((step, indices.tolist()))
                loss = (model(x) - 1).square().mean()
                if bad(visit, step, indices.tolist()):
                    loss = spoil(model, loss)
                (scaler.scale(loss) if scaler else loss).backward()
                if form == "update":
                    done = run.update(loss, adam, rates, scaler=scaler, clip_norm=clip_norm)
                else:
                    done = run.should_step(loss)
                    if done:
                        adam.step()
                        if rates is not None:
                            rates.step()
                    adam.zero_grad()
                outcome.updated.append(done)
                run.log(loss=loss)
                if at and visit in at:
                    at[visit](run)
    except forge.Exit as error:
        outcome.code, outcome.text = int(error.code), error.text
    except Killed:
        outcome.code = -signal.SIGKILL
    finally:
        stopping.uninstall()
    del stateful["scaler"]
    outcome.state = {k: v.state_dict() for k, v in stateful.items() if v is not None}
    return outcome


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The events of this kind in the ledger, over all attempts."""
    return [e for a in ledger.read(directory).attempts for e in a.events if e["kind"] == kind]


def checkpoints(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("step_*")}


def assert_same_state(one: Any, other: Any, where: str = "state") -> None:
    """Bit by bit, NaNs included."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        one_bytes, other_bytes = (t.detach().contiguous().numpy().tobytes() for t in (one, other))
        assert same, where
        assert one_bytes == other_bytes, where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_state(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same_state(*pair, f"{where}[{i}]")
    else:
        assert one == other, where


def assert_close(
    one: torch.Tensor, other: torch.Tensor, rtol: float = 1.3e-6, atol: float = 1e-5
) -> None:
    """Like torch.testing.assert_close, whose import of DTensor takes a second per test process."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert torch.allclose(one, other, rtol=rtol, atol=atol), (one, other)


def streak(first: int, length: int) -> Callable[[int, int, list[int]], bool]:
    """Bad in these iterations of the first attempt, whatever their data: a transient fault."""
    return lambda visit, step, indices: first <= visit < first + length


def nan_gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The loss stays finite; the gradient of the last weight is NaN."""
    return loss + (model[2].weight * 0).sum().sqrt()


def inf_gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The loss stays finite; the gradient of the first bias is Inf."""
    return loss + model[0].bias.sum() * 0 + _InfGradient.apply(model[0].bias).sum() * 0


class _InfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf)
