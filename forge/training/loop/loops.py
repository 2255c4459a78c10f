"""Where a run is: the loops over `run.steps`, the steps done, and the place of each in its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from forge import messages
from forge.data.fixed import FixedParts
from forge.data.position import Position
from forge.errors import StateMismatch
from forge.process import sections
from forge.state import rng
from forge.training.loop.resumable_loader import ResumableLoaders


class Phase(Enum):
    """Which part of an epoch of `run.epochs` is under way."""

    before = "before"
    within = "within"
    after = "after"
    """The pass has ended."""


@dataclass
class Place:
    """Where a run is in the loop over `run.epochs`."""

    epoch: int = 0
    step: int = 0
    """Steps done as the epoch began."""
    planned: int = 0
    """Epochs that the loop is to do."""
    phase: Phase = Phase.before
    rng: dict[str, Any] = field(default_factory=dict)
    """The random state in which the epoch began."""
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Where those of `run.loader` were then."""
    values: dict[str, Any] | bool | None = None
    """`run.state` as the epoch began; in a checkpoint True: as it is saved. None: too large."""


class Loops:
    """What a checkpoint knows of the loops that were begun."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done."""
        self.planned: int | None = None
        """Steps that the last loop is to do."""
        self.due: list[str] | None = None
        """Functions of `run.every` that are to run at this boundary; None: not known yet."""
        self.finished_by = ""
        """What `run.finish` was given, where that ended the last loop."""
        self.is_complete = False
        """Whether a finished run was loaded, of which no loop has begun again."""
        self.is_in_step = False
        self.is_between = False
        """Whether the user's code runs outside a loop, after one."""
        self._ended: list[dict[str, Any]] = []
        """The random state in which each loop ended: what follows it runs again, and draws."""
        self.loaded: dict[str, Any] | None = None
        """The places and random states that were loaded, until a loop gets there."""
        self.positions: list[Position | dict[str, Any] | None] = []
        """One a loop; one that was over before it began keeps the state it was loaded with."""
        self.loaders = ResumableLoaders()
        """Those of `run.loader`."""
        self.place: Place | None = None
        """In the loop over `run.epochs`; None: there is none."""
        self.fixed = FixedParts()
        """Of the loaders that are read."""
        self._broken_off: set[int] = set()
        self._is_longer = False
        """Whether a loop was passed over that is to do more steps than were planned."""
        self._said: set[str] = set()

    def open(self, loader: Iterable[Any], epoch: int = 0) -> Position:
        """At the start of its data; what no resume can repeat exactly is logged once."""
        self.fixed.watch(loader)
        position = Position(loader, epoch)
        for before in self.positions:
            if isinstance(before, Position):
                position.know(before)
        for sentence in position.inexact():
            if sentence not in self._said:
                messages.warn(f"A resume may not be exact here: {sentence}")
                self._said.add(sentence)
        return position

    @property
    def epoch(self) -> int:
        """The epoch of `run.epochs`, else of the loader that is being read; 0 without one."""
        if self.place is not None:
            return self.place.epoch
        position = self.positions[-1] if self.positions else None
        return position.epoch if isinstance(position, Position) else 0

    @property
    def batch(self) -> int:
        """Batches done of the pass through the loader that is being read."""
        position = self.positions[-1] if self.positions else None
        if self.place is not None and self.place.phase is Phase.before:
            return 0
        return position.taken - self.is_in_step if isinstance(position, Position) else 0

    @property
    def is_in_epochs(self) -> bool:
        """Whether the user's code runs inside the loop over `run.epochs`."""
        has_begun = self.place is not None and bool(self.positions)
        return has_begun and not self.is_between

    @property
    def next_boundary(self) -> int:
        """Steps that are done at the next boundary, or at the one where the run is."""
        return self.step + self.is_in_step

    @property
    def number(self) -> int:
        """Of the loop that was begun last, from 0."""
        return len(self.positions) - 1

    @property
    def saved_position(self) -> dict[str, Any] | None:
        """The place of the loop that was begun last, where one was loaded."""
        places = self.loaded["positions"] if self.loaded is not None else []
        return places[self.number] if self.is_known else None

    @property
    def is_known(self) -> bool:
        """Whether the loop that was begun last had begun when the checkpoint was saved."""
        return self.loaded is not None and self.number < len(self.loaded["positions"])

    @property
    def is_resumed(self) -> bool:
        """Whether the loop that was begun last is the one in which the checkpoint was saved."""
        return self.loaded is not None and len(self.loaded["positions"]) == len(self.positions)

    def is_in_pass_of(self, state: dict[str, Any]) -> bool:
        """Whether a captured state is of the pass that is under way, or of the same loop."""
        saved, place = state["epochs"], self.place
        is_within = saved is not None and saved["phase"] == Phase.within.name
        return place is None or (is_within and saved["epoch"] == place.epoch)

    def enter_epochs(self) -> Place:
        """The loop over `run.epochs` begins, where it was saved if it was."""
        if self.place is None and self.loaded is not None and self.loaded["positions"]:
            raise StateMismatch(
                "data: expected the place in a loop over run.epochs, found that in one over"
                " run.steps: a training cannot change from one to the other. Keep run.steps, or"
                " start in a new directory"
            )
        self.positions.append(None)
        self.positions[-1] = self.saved_position
        self.place = self.place or Place()
        return self.place

    def is_over(self, n: float) -> bool:
        """Whether nothing is left to train of the loop that was begun last."""
        return self.step >= n or self.number in self._broken_off

    def has_finished(self, n: float) -> bool:
        """Whether a run was loaded that finished with so many steps planned, or more."""
        return self.is_complete and self.planned is not None and n <= self.planned

    def break_off(self) -> None:
        """The loop ends before its `n`, at every later start as well."""
        self._broken_off.add(self.number)

    def leave(self) -> None:
        """The loop is left: what follows draws from here on."""
        self.fixed.end_loop()
        self._ended.append(rng.capture())
        self.is_between = True
        sections.current().rest()

    @property
    def missing(self) -> str:
        """What is wrong with a script that ends without its saved loop; empty: nothing is."""
        saved = len(self.loaded["positions"]) if self.loaded is not None else 0
        if len(self.positions) >= saved or (self.is_complete and not self._is_longer):
            return ""
        name, n = ("epochs", self.place.planned) if self.place else ("steps", self.planned)
        after = f"after loop {len(self.positions)}" if self.positions else "before its first loop"
        return (
            f"the training is not finished: the checkpoint was saved in loop {saved} of this Run"
            f" (run.{name}({n})), and the script left the `with` block {after}. If it begins that"
            " loop only after an error that it caught, a resumed job never comes to it: catch the"
            " error inside the step, or keep what it changed in run.state, and loop `while run.step"
            " < n:`. To go on from this checkpoint, begin as many loops as it had"
        )

    def pass_over(self, n: float = 0) -> None:
        """The loop had ended when the run was saved: what follows it draws as it did then.

        Args:
            n: Steps that it is to do now.
        """
        self._is_longer = self._is_longer or (self.planned is not None and n > self.planned)
        self.positions[-1] = self.saved_position
        if self.loaded is not None:
            ended = self.loaded["ended"]
            rng.restore(ended[self.number] if self.number < len(ended) else self.loaded["rng"])
        self.leave()

    def capture(self) -> dict[str, Any]:
        """For a checkpoint."""
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
        """Be where that checkpoint was saved."""
        self.step, self.planned, self.due = state["step"], state["planned"], state["due"]
        self._broken_off = set(state["broken_off"])
        self.finished_by = state["finished_by"]
        place = state["epochs"]
        self.place = place and Place(**{**place, "phase": Phase[place["phase"]]})
        is_begun = bool(self.positions) or not self.place or self.place.phase is Phase.before
        self.loaders.load(state["loaders"] if is_begun else self.place.loaders)
        self.loaded = {name: state[name] for name in ("positions", "ended", "rng")}

    def close(self) -> None:
        """Give the loaders' iterators up."""
        self.loaders.close()
        for position in self.positions:
            if isinstance(position, Position):
                position.close()
