"""`run.finish`: ends a loop before its `n`, after the same step on every rank."""

from __future__ import annotations

from collections.abc import Callable

from forge.errors import ForgeError
from forge.group import facts
from forge.group.facts import Consensus, FinishRequest
from forge.training import misuse
from forge.training.parts import Parts


class LoopEnd:
    """A request to finish, and its agreement between ranks.

    A proposal of one rank normally takes effect at a boundary that depends on the clock, but the
    number of steps of a training must not depend on the clock. So ranks exchange a request to
    finish where all of them meet: after functions of `run.every`, and after the code that follows
    a pass.
    """

    def __init__(self, parts: Parts) -> None:
        self._group = parts.group
        self._exchange = parts.exchange
        self._shutdown = parts.shutdown
        self._loops = parts.loops
        self._nan = parts.nan
        self._own: FinishRequest | None = None
        self._known: FinishRequest | None = None

    def request(self, text: str, *, is_in_function: bool) -> None:
        """Handle a call of `run.finish`.

        Args:
            text: The explanation given by the script.
            is_in_function: Whether a function of `run.every`, or the code after a pass, is running.
        Raises:
            ForgeError: Outside the loop, or in a step if there are several ranks.
        """
        if not (self._loops.is_in_step or is_in_function):
            raise ForgeError(misuse.FINISH_OUTSIDE_A_LOOP)
        at = (self._loops.number, self._loops.next_boundary)
        request = FinishRequest(*at, text, self._nan.rollbacks)
        if self._group.size == 1:
            self._group.propose(request)
        elif not is_in_function:
            raise ForgeError(
                "run.finish() was called inside a step, but this is one of"
                f" {self._group.size} ranks, which must all end after the same step: call it in a"
                " function of run.every, or after an epoch's pass."
            )
        else:
            self._own = request

    def share(self, unless: Callable[[], object] | None = None) -> None:
        """Exchange requests of all ranks, unless the ranks stop at this boundary."""
        if self._group.size == 1:
            return
        own, self._own = self._own, None
        text = None if own is None else facts.to_text(own)
        with self._shutdown.giving_up():
            texts = self._exchange.all_gather("the end of a function", lambda: text, unless)
        for fact in (facts.from_text(one) for one in texts if one is not None):
            self._known = Consensus(finish=self._known).including(fact).finish

    def added_to(self, agreed: Consensus) -> Consensus:
        """Add the request to finish, if there is one, to the agreed values."""
        return agreed if self._known is None else agreed.including(self._known)
