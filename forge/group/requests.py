"""Requests at step boundaries: the watchers that make them, and the consensus of all ranks.

A request starts on one rank: a signal it received, its clock, a call of `run.save()`. No rank acts
on a request directly. The rank proposes it to all others, and once every rank has it, it is part of
the `Consensus`, which has the same value on every rank at the same step. A request that was agreed
on is never withdrawn: whether it was acted on follows from the step alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from forge.errors import Reason


@dataclass(frozen=True)
class StopRequest:
    """Request to save and exit: a signal or the time limit."""

    code: int
    """The exit code of all ranks."""
    reason: Reason
    signal: str | None = None
    """The signal, such as `SIGTERM`; None if there was none."""
    boundary: int | None = None
    """The boundary of which the rank has a pending snapshot, so that it can stop there."""


@dataclass(frozen=True)
class SaveRequest:
    """Request for a checkpoint: by `run.save`, a signal or the clock."""

    step: int
    """Save after this step, or a later one."""
    is_periodic: bool = False
    """Whether the clock requested it."""
    rollbacks: int = 0
    """Number of rollbacks before: a request after a rollback overrides earlier ones."""


@dataclass(frozen=True)
class FinishRequest:
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
class FailureReport:
    """This rank cannot continue: for example, it cannot write checkpoints."""

    code: int
    text: str


Request = StopRequest | SaveRequest | FinishRequest | FailureReport


@dataclass(frozen=True)
class Consensus:
    """The requests that all ranks have.

    The first request of each kind counts; but of saves the one with the latest step, and of
    finishes the one of the latest loop, each since the last rollback.
    """

    failed: FailureReport | None = None
    finish: FinishRequest | None = None
    stop: StopRequest | None = None
    save: SaveRequest | None = None

    def including(self, fact: Request) -> Consensus:
        """Add a request."""
        match fact:
            case FailureReport():
                return replace(self, failed=self.failed or fact)
            case FinishRequest():
                ends = (self.finish or fact, fact)
                return replace(self, finish=max(ends, key=lambda f: (f.loop, f.rollbacks)))
            case StopRequest():
                return replace(self, stop=self.stop or fact)
            case SaveRequest():
                # Prefer explicit calls at the same step: a periodic save can be skipped.
                saves = (self.save or fact, fact)
                last = max(saves, key=lambda s: (s.rollbacks, s.step, not s.is_periodic))
                return replace(self, save=last)


_KINDS: dict[str, Any] = {
    one.__name__: one for one in (StopRequest, SaveRequest, FinishRequest, FailureReport)
}


def to_text(fact: Request) -> str:
    """Encode a request for the other ranks; equal requests have equal texts."""
    values = vars(fact)
    if isinstance(fact, StopRequest):
        values = values | {"reason": fact.reason.name}
    return json.dumps({"kind": type(fact).__name__, **values}, sort_keys=True)


def from_text(text: str) -> Request:
    """Decode the result of `to_text`."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if values.get("reason"):
        values["reason"] = Reason[values["reason"]]
    fact: Request = kind(**values)
    return fact


class Watcher:
    """Base class: each method does nothing, and a method that a class leaves out costs nothing.

    The methods are called in the main thread; `step` is the number of steps done.
    """

    def on_boundary(self, step: int) -> None:
        """A step boundary is reached, before anything is decided there."""

    def request(self, step: int) -> Request | None:
        """A request of this rank at this boundary; called before each decision.

        Raises:
            ForgeError: If the job cannot continue.
        """

    def before_step(self, step: int) -> Request | None:
        """A request of this rank in place of another step."""

    def on_step(self, step: int) -> None:
        """The boundary is left: a step begins, with the reading of its batch."""

    def on_batch(self, batch: Any) -> None:
        """The batch of the step was read; None without a loader."""

    def on_evaluation(self, step: int) -> None:
        """Functions of `run.every`, or the code after a pass, begin."""

    def on_loop_end(self, step: int) -> None:
        """A loop has ended: the code after it begins."""

    def on_stop(self) -> None:
        """The attempt ends here: callbacks run, and child processes end."""
