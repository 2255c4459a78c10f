"""What one process learns by itself, and what all of them know.

A fact is local: a signal that came to this rank, its clock, `run.save()` in its process. Nobody
acts on a fact. It is proposed, and once every rank knows it, it is part of `Agreed`, the same value
on every rank at the same step. Nothing that was agreed on is taken back: whether it was acted on
follows from the step, never from who has read it first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from forge.errors import Reason


@dataclass(frozen=True)
class StopAsked:
    """The process is to save and leave: a signal, the time limit, or a health check."""

    code: int
    """The exit code, one for all ranks."""
    reason: Reason
    signal: str | None = None
    """`SIGTERM`; None where no signal came."""
    boundary: int | None = None
    """Where the rank holds a boundary, and could stop at that: which one."""
    text: str = ""
    """Why, for people, where the reason does not say all."""


@dataclass(frozen=True)
class SaveAsked:
    """A checkpoint is wanted: by `run.save`, a signal or the clock."""

    step: int
    """Of that many steps done, or of more."""
    is_periodic: bool = False
    """Whether by the clock."""
    rollbacks: int = 0
    """How many there had been: what is asked for after one counts more than what was before."""
    is_pinned: bool = False
    """Whether to keep the checkpoint permanently."""


@dataclass(frozen=True)
class FinishAsked:
    """`run.finish` was called: the loop ends."""

    loop: int
    """Which call of `run.steps`, from 0: a loop that follows has an end of its own."""
    step: int
    """Once so many steps are done."""
    text: str
    """Why, in the user's words."""
    rollbacks: int = 0
    """How many there had been: one more undoes the step that asked for it."""


@dataclass(frozen=True)
class Failed:
    """This process cannot go on: its checkpoints cannot be written, or its results are in doubt."""

    code: int
    text: str
    reason: Reason | None = None
    """Where it is not the one that belongs to the code."""


Fact = StopAsked | SaveAsked | FinishAsked | Failed


@dataclass(frozen=True)
class Agreed:
    """What every rank knows.

    Of each kind the first counts, of saves that of the latest step, of ends the latest loop's; of
    both those after the last rollback.
    """

    failed: Failed | None = None
    finish: FinishAsked | None = None
    stop: StopAsked | None = None
    save: SaveAsked | None = None

    def including(self, fact: Fact) -> Agreed:
        """The same with one more fact."""
        match fact:
            case Failed():
                return replace(self, failed=self.failed or fact)
            case FinishAsked():
                ends = (self.finish or fact, fact)
                return replace(self, finish=max(ends, key=lambda f: (f.loop, f.rollbacks)))
            case StopAsked():
                return replace(self, stop=self.stop or fact)
            case SaveAsked():
                # At one step: by the clock it may be left out, by a call it may not.
                saves = (self.save or fact, fact)
                last = max(
                    saves, key=lambda s: (s.rollbacks, s.step, not s.is_periodic, s.is_pinned)
                )
                return replace(self, save=last)


_KINDS: dict[str, Any] = {one.__name__: one for one in (StopAsked, SaveAsked, FinishAsked, Failed)}


def to_text(fact: Fact) -> str:
    """A fact as one rank tells it to the others; equal ones have equal texts."""
    values = vars(fact)
    if isinstance(fact, (StopAsked, Failed)):
        values = values | {"reason": fact.reason and fact.reason.name}
    return json.dumps({"kind": type(fact).__name__, **values}, sort_keys=True)


def from_text(text: str) -> Fact:
    """What `to_text` was given."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if values.get("reason"):
        values["reason"] = Reason[values["reason"]]
    fact: Fact = kind(**values)
    return fact
