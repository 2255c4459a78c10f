"""`run.finish`: the end of a loop before its `n`, after the same step on every rank."""

from __future__ import annotations

from collections.abc import Callable

from forge.checkpoint.save.together import Exchange
from forge.errors import ForgeError
from forge.group import facts
from forge.group.facts import Agreed, FinishAsked
from forge.group.group import Group
from forge.training.leaving import ENDS, Leaving
from forge.training.loop.loops import Loops
from forge.training.nan.nan_policy import NanPolicy


class LoopEnd:
    """What was asked for, and what all ranks know of it.

    A fact that one rank proposes counts from a boundary on that depends on the clock, and how many
    steps a training has must not. So ranks exchange it where all of them are: after functions of
    `run.every`, and after what follows a pass.

    Args:
        group: The ranks.
        exchange: Of values, at a boundary.
        leaving: For a rank that is gone.
        loops: Where the run is.
        nan: Counts rollbacks, which take back what was asked before them.
    """

    def __init__(
        self, group: Group, exchange: Exchange, leaving: Leaving, loops: Loops, nan: NanPolicy
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._leaving = leaving
        self._loops = loops
        self._nan = nan
        self._own: FinishAsked | None = None
        self._known: FinishAsked | None = None

    def ask(self, text: str, *, is_in_function: bool) -> None:
        """`run.finish` was called.

        Args:
            text: Why, for people.
            is_in_function: Whether one of `run.every` runs, or what follows a pass.
        Raises:
            ForgeError: Outside the loop, and in a step of one of several ranks.
        """
        if not (self._loops.is_in_step or is_in_function):
            raise ForgeError(
                "run.finish() was called outside the loop over run.steps, where nothing is left to"
                " end: call it in a step, in a function of run.every, or after an epoch's pass."
            )
        at = (self._loops.number, self._loops.next_boundary)
        asked = FinishAsked(*at, text, self._nan.rollbacks)
        if self._group.size == 1:
            self._group.propose(asked)
        elif not is_in_function:
            raise ForgeError(
                "run.finish() was called inside a step, and this is one of"
                f" {self._group.size} ranks, which have to end after the same step in every run:"
                " call it in a function of run.every, or after an epoch's pass."
            )
        else:
            self._own = asked

    def share(self, unless: Callable[[], object] | None = None) -> None:
        """One rank may have asked: from this boundary on all know it, unless they stop at it."""
        if self._group.size == 1:
            return
        own, self._own = self._own, None
        text = None if own is None else facts.to_text(own)
        try:
            texts = self._exchange.give("the end of a function", lambda: text, unless)
        except ENDS as error:
            self._leaving.give_up(error)
        for fact in (facts.from_text(one) for one in texts if one is not None):
            self._known = Agreed(finish=self._known).including(fact).finish

    def added_to(self, agreed: Agreed) -> Agreed:
        """What is agreed on, with that."""
        return agreed if self._known is None else agreed.including(self._known)
