"""The decision at a step boundary, as a pure function of values that all ranks have.

    facts ─► proposals ─► Consensus ─► decide ─► act

`decide` reads no signal, clock or file: every rank calls it with equal values after the same step,
so every rank does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forge.errors import ExitCode
from forge.group.requests import Consensus, FinishRequest, StopRequest


@dataclass(frozen=True)
class Halt:
    """Exit without a save: the state is bad, or cannot be saved."""

    text: str
    code: int = int(ExitCode.HALTED)


@dataclass(frozen=True)
class RollBack:
    """Go back to a checkpoint from before a bad step."""

    first_bad: int


@dataclass(frozen=True)
class Finish:
    """The loop ends: its `n` is reached, or `run.finish` was called."""

    request: FinishRequest | None
    """The call of `run.finish`; None: `n` is reached."""
    save: Save | None
    """A save that is also due here, because the code after the loop can take long."""
    stop: StopRequest | None
    """A stop that is also due here: the end of the loop is saved, and the code after it not run."""


@dataclass(frozen=True)
class Stop:
    """Save and exit."""

    request: StopRequest


@dataclass(frozen=True)
class Save:
    """Save and continue."""

    is_periodic: bool


@dataclass(frozen=True)
class Go:
    """Do the next step."""


Decision = Halt | RollBack | Finish | Stop | Save | Go


class LocalInputs(NamedTuple):
    """Inputs that every rank knows without communication: the config and the steps done."""

    loop: int
    """Number of the call of `run.steps`, from 0."""
    n: int | None
    """Steps that the loop is to do; None: it ends otherwise."""
    every_steps: int | None
    """Save when a multiple of this is reached or passed; None: not by steps."""
    saved: int | None
    """Step of the last save or of the resumed checkpoint; None: nothing is saved yet."""
    nan: Halt | RollBack | None
    """The decision of the NaN policy, equal on all ranks because it uses reduced values."""
    rollbacks: int = 0
    stride: int = 1
    """Steps between the boundary before this one and this one."""


def decide(agreed: Consensus, step: int, known: LocalInputs) -> Decision:
    """The first decision that applies, in the order of the classes above.

    Args:
        agreed: The requests (signals, clocks, calls) that all ranks have.
        step: Steps done.
        known: Inputs that every rank knows without communication.
    """
    if agreed.failed is not None:
        return Halt(agreed.failed.text, agreed.failed.code)
    if known.nan is not None:
        return known.nan
    save = _save(agreed, step, known)
    finish = agreed.finish
    is_here = finish is not None and finish.loop == known.loop and step >= finish.step
    if finish is not None and is_here and finish.rollbacks == known.rollbacks:
        return Finish(finish, save, agreed.stop)
    if known.n is not None and step >= known.n:
        return Finish(None, save, agreed.stop)
    if agreed.stop is not None:
        return Stop(agreed.stop)
    return save or Go()


def _save(agreed: Consensus, step: int, known: LocalInputs) -> Save | None:
    request = agreed.save
    is_open = request is not None and step >= request.step
    if step == known.saved:
        return None
    if request is not None and is_open and (known.saved is None or known.saved < request.step):
        return Save(request.is_periodic)
    is_start = known.saved is None and step == 0  # the initial state can be built again
    is_multiple = known.every_steps is not None and step % known.every_steps < known.stride
    return Save(is_periodic=True) if is_multiple and not is_start else None
