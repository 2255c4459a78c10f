"""Exactly what a checkpoint stores of the loops of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class EpochPhase(Enum):
    """The current part of an epoch of `run.epochs`."""

    before = "before"
    within = "within"
    after = "after"
    """The pass has ended."""


@dataclass
class EpochPosition:
    """The position in the loop over `run.epochs`."""

    epoch: int = 0
    step: int = 0
    """Steps done at the start of the epoch."""
    planned: int = 0
    """Epochs that the loop is to do."""
    phase: EpochPhase = EpochPhase.before
    rng: dict[str, Any] = field(default_factory=dict)
    """The random state at the start of the epoch."""
    values: dict[str, Any] | bool | None = None
    """`run.state` at the epoch's start; in a checkpoint True: as saved there. None: too large."""


@dataclass(frozen=True)
class LoopState:
    """The progress of a run between two of its steps."""

    step: int
    """Steps done."""
    planned: int | None
    """Steps that the last loop is to do."""
    broken_off: list[int]
    """Numbers of the loops that ended before their `n`; no later start continues them."""
    positions: list[dict[str, Any] | None]
    """The position of each loop in its data."""
    ended: list[dict[str, Any]]
    """The random state at the end of each loop; code after a loop runs again from there."""
    loaders: list[dict[str, Any]]
    """The position of each loader of `run.steps` after the first."""
    due: list[str] | None
    """Functions of `run.every` that are still to run at this boundary; None: not determined."""
    epochs: EpochPosition | None
    """The position in the loop over `run.epochs`; None without such a loop."""
    finished_by: str
    """The reason given to `run.finish`, if that ended the last loop."""
    rng: dict[str, Any]
    """The random state of now."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> LoopState:
        """The state in a checkpoint."""
        found = {one.name: stored[one.name] for one in fields(cls)}
        if epochs := found["epochs"]:
            found["epochs"] = EpochPosition(**{**epochs, "phase": EpochPhase[epochs["phase"]]})
        return cls(**found)

    def stored(self) -> dict[str, Any]:
        """The values for a checkpoint."""
        epochs = self.epochs and vars(self.epochs) | {"phase": self.epochs.phase.name}
        return vars(self) | {"epochs": epochs}

    @property
    def is_pushed(self) -> bool:
        """Whether one of the loops is one that forge does not own."""
        return any(map(is_pushed, self.positions))


_PUSHED = "is_pushed"


def pushed(epoch: int) -> dict[str, Any]:
    """The position of a loop that calls `run.boundary`; its loader saves its own place."""
    return {_PUSHED: True, "epoch": epoch}


def is_pushed(position: object) -> bool:
    """Whether a position is that of such a loop."""
    return isinstance(position, dict) and _PUSHED in position
