"""What happens at a boundary: one pure function of what all ranks know.

    facts ─► proposals ─► Agreed ─► decide ─► act

`decide` sees no signal, no clock and no disk, and its types keep it so: on every rank it is called
with equal values after the same step, and so every rank does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forge.errors import ExitCode, Reason
from forge.group.facts import Agreed, FinishAsked, StopAsked


@dataclass(frozen=True)
class Halt:
    """Leave without a save: the state is bad, or cannot be saved."""

    text: str
    code: int = int(ExitCode.HALTED)
    reason: Reason | None = None
    """Where it is not the one that belongs to the code."""


@dataclass(frozen=True)
class RollBack:
    """Go back to a checkpoint from before a bad step."""

    first_bad: int


@dataclass(frozen=True)
class Finish:
    """The loop ends: its `n` is reached, or `run.finish` was called."""

    asked: FinishAsked | None
    """None: `n` is reached."""
    save: Save | None
    """One that is due here as well: what follows the loop may take long."""
    stop: StopAsked | None
    """One that is due here as well: the end of the loop is saved, what follows it is left."""


@dataclass(frozen=True)
class Stop:
    """Save and leave."""

    asked: StopAsked
    is_pinned: bool = False
    """Whether to keep what is saved permanently."""


@dataclass(frozen=True)
class Save:
    """Save and go on."""

    is_periodic: bool
    is_pinned: bool = False
    """Whether to keep it permanently, and what is saved of this step already."""


@dataclass(frozen=True)
class Go:
    """On to the next step."""


Decision = Halt | RollBack | Finish | Stop | Save | Go


class Known(NamedTuple):
    """What every rank knows without asking, since it follows from the config and the steps done."""

    loop: int
    """Which call of `run.steps` it is, from 0."""
    n: int | None
    """Steps that the loop is to do; None: it ends otherwise."""
    every_steps: int | None
    """A save is due at its multiples; None: never by the number of steps."""
    saved: int | None
    """Where a save was decided on last, or what was resumed from; None: nothing is saved yet."""
    nan: Halt | RollBack | None
    """What the NaN policy wants, which judges by reduced values."""
    rollbacks: int = 0
    """How many there have been."""
    pinned: int | None = None
    """Where a checkpoint was pinned last."""


def decide(agreed: Agreed, step: int, known: Known) -> Decision:
    """The first that applies, in the order of the classes above.

    Args:
        agreed: What all ranks know of signals, clocks and calls.
        step: Steps done.
        known: What they know anyway.
    """
    if agreed.failed is not None:
        return Halt(agreed.failed.text, agreed.failed.code, agreed.failed.reason)
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
        return Stop(agreed.stop, is_pinned=save is not None and save.is_pinned)
    return save or Go()


def _save(agreed: Agreed, step: int, known: Known) -> Save | None:
    asked = agreed.save
    is_open = asked is not None and step >= asked.step
    if asked is not None and is_open and asked.is_pinned:
        # What was saved meanwhile would do, but for the pin.
        is_pinned = known.pinned is not None and known.pinned >= asked.step
        if not is_pinned:
            return Save(is_periodic=False, is_pinned=True)
    if step == known.saved:
        return None
    if asked is not None and is_open and (known.saved is None or known.saved < asked.step):
        return Save(asked.is_periodic)
    is_start = known.saved is None and step == 0  # what nothing was done for can be built again
    is_multiple = known.every_steps is not None and step % known.every_steps == 0
    return Save(is_periodic=True) if is_multiple and not is_start else None
