"""Checks that all ranks do the same number of steps, in a loop and in a pass of `run.batches`.

A rank that ends first would leave the others waiting in a collective. Before the first step the
ranks compare `n`, and the lengths of their loaders in a pass. If a loader has no length, a rank
that reaches the end of its pass waits there for the others before the code after the pass runs.
"""

from __future__ import annotations

import math

from forge.errors import ConfigError, RankLost
from forge.training.parts import Parts
from forge.training.shutdown import ENDS

_REMEDY = (
    "Every rank needs the same number of batches: share the samples by a"
    " forge.data.GlobalBatchSampler or a torch.utils.data.DistributedSampler, or let all ranks end"
    " after as many batches as the shortest loader has"
)


_LEFT_S = 30.0
"""Largest delay between ranks, in seconds, at a break after the same step."""


class LoopLengths:
    """Compares the lengths of the ranks' loops and passes."""

    def __init__(self, parts: Parts) -> None:
        self._exchange = parts.exchange
        self._shutdown = parts.shutdown
        self._is_known = True

    def check_count(self, call: str, n: float) -> None:
        """Compare the argument of `run.steps` or `run.epochs`; exits if the ranks differ.

        Args:
            call: `steps` or `epochs`.
            n: The argument of this rank; infinite for None.
        """
        found = self._given(f"the beginning of run.{call}", None if math.isinf(n) else int(n))
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            problem = (
                f"run.{call}(n): n is {found[0]} on rank 0, but {found[other]} on rank {other}. A"
                " rank that ends its loop first would leave the others waiting: give all ranks the"
                " same number"
            )
            self._shutdown.give_up(ConfigError([problem], "The training loop"))

    def compare(self, num_batches: int | None) -> None:
        """Compare the lengths at the start of a pass; exits if they differ.

        Args:
            num_batches: Batches of this rank's loader; None: unknown.
        """
        found = self._given("the length of a pass", num_batches)
        known = [one for one in found if one is not None]
        self._is_known = len(known) == len(found)
        if len(set(known)) > 1:
            self._refuse("The loaders that the ranks gave to run.batches differ in length", found)

    def ended(self, taken: int) -> None:
        """This rank's loader has ended; exits if the loader of another rank has not.

        Args:
            taken: Batches of the pass.
        """
        if self._is_known:
            return
        found = self._given(
            "the end of a pass",
            taken,
            f"The loader of this rank has ended after {taken} batches; the loaders of the others"
            f" seem to have more. {_REMEDY}",
        )
        if len(set(found)) > 1:
            self._refuse("The passes of the ranks differ in length", found)

    def left(self) -> None:
        """This rank has left its pass by a break, as all ranks must, or by an error.

        Called before the functions that are due after the pass, which can use collectives.

        Raises:
            RankLost: If the other ranks have not left it: the code after the pass must not run.
        """
        self._exchange.all_gather(
            "the end of a pass, after a `break`", lambda: None, within_s=_LEFT_S
        )

    def _given(self, what: str, value: int | None, hint: str = "") -> list[int | None]:
        try:
            return self._exchange.all_gather(what, lambda: value)
        except RankLost as error:
            self._shutdown.give_up(RankLost(". ".join(filter(None, (str(error), hint)))))
        except ENDS as error:
            self._shutdown.give_up(error)

    def _refuse(self, what: str, found: list[int | None]) -> None:
        by_length = {length: rank for rank, length in enumerate(found) if length is not None}
        least, most = min(by_length), max(by_length)
        problem = (
            f"{what}: rank {by_length[least]} has {least} batches, rank {by_length[most]} has"
            f" {most}. {_REMEDY}."
        )
        self._shutdown.give_up(ConfigError([problem], "The data of this job"))
