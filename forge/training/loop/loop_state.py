"""The progress of a run: its loops, the steps done, and the position of each loop in its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from forge import messages
from forge.data import loaders
from forge.data.fixed import FixedParts
from forge.data.position import Position
from forge.errors import StateMismatch
from forge.process import sections
from forge.state import rng
from forge.training.loop.resumable_loader import ResumableLoaders

_PUSHED = "is_pushed"
"""Marks the position of a loop that calls `run.boundary`."""


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
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Positions of the loaders of `run.loader` at the start of the epoch."""
    values: dict[str, Any] | bool | None = None
    """`run.state` at the epoch's start; in a checkpoint True: as saved there. None: too large."""


class LoopState:
    """The progress that a checkpoint stores."""

    def __init__(self) -> None:
        self.step = 0
        self.planned: int | None = None
        """Steps that the last loop is to do."""
        self.due: list[str] | None = None
        """Functions of `run.every` that are still to run at this boundary; None: not determined."""
        self.finished_by = ""
        """The reason given to `run.finish`, if that ended the last loop."""
        self.is_complete = False
        """Whether a finished run was loaded and no loop of it has begun again."""
        self.is_in_step = False
        self.is_between = False
        """Whether the user's code runs outside a loop, after one."""
        self._ended: list[dict[str, Any]] = []
        """The random state at the end of each loop; code after a loop runs again from there."""
        self.loaded: dict[str, Any] | None = None
        """Loaded positions and random states, until the loop they belong to begins."""
        self.positions: list[Position | dict[str, Any] | None] = []
        """The position of each loop; a loop that was over at its start keeps its loaded one."""
        self.loaders = ResumableLoaders()
        self.place: EpochPosition | None = None
        """The position in the loop over `run.epochs`; None without such a loop."""
        self.fixed = FixedParts()
        """Fixed properties of the loaders in use."""
        self._broken_off: set[int] = set()
        self._is_longer = False
        """Whether a skipped loop now has more steps to do than it was planned with."""
        self._said: set[str] = set()

    def open(self, loader: Iterable[Any], epoch: int = 0) -> Position:
        """Start reading a loader; log once what a resume cannot repeat exactly."""
        position = Position(loader, epoch)
        for before in self.positions:
            if isinstance(before, Position):
                position.know(before)
        self.fixed.watch(loader)  # refuses later changes
        for sentence in loaders.inexact(loader):
            if sentence not in self._said:
                messages.warn(f"A resume could be inexact here: {sentence}")
                self._said.add(sentence)
        return position

    def note_epoch(self, epoch: int) -> None:
        """Note the epoch of a loop that forge does not own; its loader saves its own place."""
        self.positions[-1] = {_PUSHED: True, "epoch": epoch}

    @staticmethod
    def is_pushed(position: Position | dict[str, Any] | None) -> bool:
        """Whether a position is that of such a loop."""
        return isinstance(position, dict) and _PUSHED in position

    @property
    def epoch(self) -> int:
        """The epoch of `run.epochs`, or else of the loader being read; 0 without a loader."""
        if self.place is not None:
            return self.place.epoch
        position = self.positions[-1] if self.positions else None
        if isinstance(position, dict) and self.is_pushed(position):
            return int(position["epoch"])
        return position.epoch if isinstance(position, Position) else 0

    @property
    def batch(self) -> int:
        """Batches done in this pass through the loader."""
        position = self.positions[-1] if self.positions else None
        if self.place is not None and self.place.phase is EpochPhase.before:
            return 0
        return position.taken - self.is_in_step if isinstance(position, Position) else 0

    @property
    def is_in_epochs(self) -> bool:
        """Whether the user's code runs inside the loop over `run.epochs`."""
        has_begun = self.place is not None and bool(self.positions)
        return has_begun and not self.is_between

    @property
    def next_boundary(self) -> int:
        """Steps done at the next boundary, or at the current boundary."""
        return self.step + self.is_in_step

    @property
    def number(self) -> int:
        """Number of the loop that began last, from 0."""
        return len(self.positions) - 1

    @property
    def saved_position(self) -> dict[str, Any] | None:
        """The loaded position of the loop that began last, if there is one."""
        places = self.loaded["positions"] if self.loaded is not None else []
        return places[self.number] if self.is_known else None

    @property
    def is_known(self) -> bool:
        """Whether the current loop had already begun when the checkpoint was saved."""
        return self.loaded is not None and self.number < len(self.loaded["positions"])

    @property
    def is_resumed(self) -> bool:
        """Whether the checkpoint was saved inside the current loop."""
        return self.loaded is not None and len(self.loaded["positions"]) == len(self.positions)

    def is_in_pass_of(self, state: dict[str, Any]) -> bool:
        """Whether a captured state belongs to the current pass, or to the same loop."""
        saved, place = state["epochs"], self.place
        if self.positions and self.is_pushed(self.positions[-1]):
            return False  # no loop of somebody else's can go back
        is_within = saved is not None and saved["phase"] == EpochPhase.within.name
        return place is None or (is_within and saved["epoch"] == place.epoch)

    def _of_another_kind(self, now: str) -> StateMismatch:
        """The error if the checkpoint was saved in a loop of another kind than this one."""
        assert self.loaded is not None
        is_pushed = any(map(self.is_pushed, self.loaded["positions"]))
        saved = "a loop over run.epochs" if self.place is not None else "a loop over run.steps"
        saved = "a loop with run.boundary" if is_pushed else saved
        return StateMismatch(
            f"data: the checkpoint has a position in {saved}, but this is {now}. A resumed training"
            " cannot switch between the two: keep that loop, or start in a new directory"
        )

    def enter_steps(self) -> None:
        """Begin a loop over `run.steps`."""
        self.positions.append(None)
        if self.is_pushed(self.saved_position):
            raise self._of_another_kind("a loop over run.steps")

    def enter_pushed(self) -> None:
        """Begin a loop that forge does not own, in the epoch of its checkpoint if there is one."""
        self.positions.append(None)
        saved = self.saved_position
        if self.place is not None or (self.is_known and not self.is_pushed(saved)):
            raise self._of_another_kind("a loop with run.boundary")
        self.note_epoch(0 if saved is None else saved["epoch"])

    def enter_epochs(self) -> EpochPosition:
        """Begin the loop over `run.epochs`, at its saved position if there is one."""
        if self.place is None and self.loaded is not None and self.loaded["positions"]:
            raise self._of_another_kind("a loop over run.epochs")
        self.positions.append(None)
        self.positions[-1] = self.saved_position
        self.place = self.place or EpochPosition()
        return self.place

    def is_over(self, n: float) -> bool:
        """Whether the current loop has no steps left to do."""
        return self.step >= n or self.number in self._broken_off

    def has_finished(self, n: float) -> bool:
        """Whether the loaded run finished with at least `n` steps planned."""
        return self.is_complete and self.planned is not None and n <= self.planned

    def break_off(self) -> None:
        """End the loop before its `n`; a later start does not continue it either."""
        self._broken_off.add(self.number)

    def leave(self) -> None:
        """The loop has ended: keep the random state for the code after it."""
        self.fixed.end_loop()
        self._ended.append(rng.capture())
        self.is_between = True
        sections.current().rest()

    @property
    def missing(self) -> str:
        """The error of a script that ends without reaching its saved loop; empty: no error."""
        saved = len(self.loaded["positions"]) if self.loaded is not None else 0
        if len(self.positions) >= saved or (self.is_complete and not self._is_longer):
            return ""
        name, n = ("epochs", self.place.planned) if self.place else ("steps", self.planned)
        after = f"after loop {len(self.positions)}" if self.positions else "before its first loop"
        return (
            f"the training is not finished: the checkpoint was saved in loop {saved} of this Run"
            f" (run.{name}({n})), but the script left the `with` block {after}. If the script"
            " begins that loop only after it caught an error, a resumed job never reaches it: catch"
            " the error inside the step, or keep what it changed in run.state, and loop `while"
            " run.step < n:`. To continue from this checkpoint, begin as many loops as the saved"
            " run"
        )

    def pass_over(self, n: float = 0) -> None:
        """Skip a loop that had ended at the save; restores the random state of its end.

        Args:
            n: Steps that the loop is to do now.
        """
        self._is_longer = self._is_longer or (self.planned is not None and n > self.planned)
        self.positions[-1] = self.saved_position
        if self.loaded is not None:
            ended = self.loaded["ended"]
            rng.restore(ended[self.number] if self.number < len(ended) else self.loaded["rng"])
        self.leave()

    def capture(self) -> dict[str, Any]:
        """The progress, for a checkpoint."""
        return {
            "step": self.step,
            "planned": self.planned,
            "broken_off": sorted(self._broken_off),
            "positions": [p.state() if isinstance(p, Position) else p for p in self.positions],
            "ended": self._ended,
            "loaders": self.loaders.capture(),
            "due": self.due,
            "epochs": self.place and vars(self.place) | {"phase": self.place.phase.name},
            "finished_by": self.finished_by,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the progress from a checkpoint."""
        self.step, self.planned, self.due = state["step"], state["planned"], state["due"]
        self._broken_off = set(state["broken_off"])
        self.finished_by = state["finished_by"]
        place = state["epochs"]
        self.place = place and EpochPosition(**{**place, "phase": EpochPhase[place["phase"]]})
        is_begun = bool(self.positions) or not self.place or self.place.phase is EpochPhase.before
        self.loaders.load(state["loaders"] if is_begun else self.place.loaders)
        self.loaded = {name: state[name] for name in ("positions", "ended", "rng")}

    def close(self) -> None:
        """Close the iterators of the loaders."""
        self.loaders.close()
        for position in self.positions:
            if isinstance(position, Position):
                position.close()
