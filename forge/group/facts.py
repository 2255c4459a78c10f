"""Requests of a single rank, and the consensus of all ranks on them.

A request starts on one rank: a signal it received, its clock, a call of `run.save()`. No rank acts
on a request directly. The rank proposes it to all others, and once every rank has it, it is part of
`Agreed`, which has the same value on every rank at the same step. A request that was agreed on is
never withdrawn: whether it was acted on follows from the step alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from forge.errors import Reason


@dataclass(frozen=True)
class StopAsked:
    """Request to save and exit: a signal, the time limit, or a failed health check."""

    code: int
    """The exit code of all ranks."""
    reason: Reason
    signal: str | None = None
    """The signal, such as `SIGTERM`; None if there was none."""
    boundary: int | None = None
    """The boundary of which the rank has a pending snapshot, so that it can stop there."""
    text: str = ""
    """Details for people, if the reason is not enough."""


@dataclass(frozen=True)
class SaveAsked:
    """Request for a checkpoint: by `run.save`, a signal or the clock."""

    step: int
    """Save after this step, or a later one."""
    is_periodic: bool = False
    """Whether the clock requested it."""
    rollbacks: int = 0
    """Number of rollbacks before: a request after a rollback overrides earlier ones."""
    is_pinned: bool = False
    """Whether to keep the checkpoint permanently."""


@dataclass(frozen=True)
class FinishAsked:
    """Request to end the loop: `run.finish` was called."""

    loop: int
    """Number of the `run.steps` call, from 0: it does not end later loops."""
    step: int
    """End after this step."""
    text: str
    """The reason that the user passed."""
    rollbacks: int = 0
    """Number of rollbacks before: another rollback undoes the step that requested the end."""


@dataclass(frozen=True)
class Failed:
    """This rank cannot continue: it cannot write checkpoints, or its results are unreliable."""

    code: int
    text: str
    reason: Reason | None = None
    """The reason, if it is not the usual one for the code."""


Fact = StopAsked | SaveAsked | FinishAsked | Failed


@dataclass(frozen=True)
class Agreed:
    """The requests that all ranks have.

    The first request of each kind counts; but of saves the one with the latest step, and of
    finishes the one of the latest loop, each since the last rollback.
    """

    failed: Failed | None = None
    finish: FinishAsked | None = None
    stop: StopAsked | None = None
    save: SaveAsked | None = None

    def including(self, fact: Fact) -> Agreed:
        """Add a request."""
        match fact:
            case Failed():
                return replace(self, failed=self.failed or fact)
            case FinishAsked():
                ends = (self.finish or fact, fact)
                return replace(self, finish=max(ends, key=lambda f: (f.loop, f.rollbacks)))
            case StopAsked():
                return replace(self, stop=self.stop or fact)
            case SaveAsked():
                # Prefer explicit calls at the same step: a periodic save can be skipped.
                saves = (self.save or fact, fact)
                last = max(
                    saves, key=lambda s: (s.rollbacks, s.step, not s.is_periodic, s.is_pinned)
                )
                return replace(self, save=last)


_KINDS: dict[str, Any] = {one.__name__: one for one in (StopAsked, SaveAsked, FinishAsked, Failed)}


def to_text(fact: Fact) -> str:
    """Encode a request for the other ranks; equal requests have equal texts."""
    values = vars(fact)
    if isinstance(fact, (StopAsked, Failed)):
        values = values | {"reason": fact.reason and fact.reason.name}
    return json.dumps({"kind": type(fact).__name__, **values}, sort_keys=True)


def from_text(text: str) -> Fact:
    """Decode the result of `to_text`."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if values.get("reason"):
        values["reason"] = Reason[values["reason"]]
    fact: Fact = kind(**values)
    return fact
