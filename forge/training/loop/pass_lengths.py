"""That all ranks have a pass of the same length: one that ends first leaves the others in a step.

Before its first step they compare what their loaders say. Where one of them says nothing, those
that come to the end of the pass wait for the others there, before what follows it runs.
"""

from __future__ import annotations

from forge.checkpoint.save.together import Exchange
from forge.errors import ConfigError, RankLost
from forge.training.leaving import ENDS, Leaving

_REMEDY = (
    "Every rank needs as many batches as the others: share the samples by a"
    " forge.data.GlobalBatchSampler or a torch.utils.data.DistributedSampler, or let all ranks end"
    " after as many as the shortest has"
)


_LEFT_S = 30.0
"""Seconds that the ranks may come after each other to a break after the same step."""


class PassLengths:
    """Those of the ranks' loaders, one pass after the other.

    Args:
        exchange: Of values, at a boundary.
        leaving: For a pass that not all of them could finish.
    """

    def __init__(self, exchange: Exchange, leaving: Leaving) -> None:
        self._exchange = exchange
        self._leaving = leaving
        self._is_known = True

    def compare(self, num_batches: int | None) -> None:
        """A pass begins; leaves where it cannot end on all ranks together.

        Args:
            num_batches: That this rank's loader has; None: it does not say.
        """
        found = self._given("the length of a pass", num_batches)
        known = [one for one in found if one is not None]
        self._is_known = len(known) == len(found)
        if len(set(known)) > 1:
            self._refuse("The loaders given to run.batches differ in length", found)

    def ended(self, taken: int) -> None:
        """This rank's loader has come to its end; leaves where another's has not.

        Args:
            taken: Batches of the pass.
        """
        if self._is_known:
            return
        found = self._given(
            "the end of a pass",
            taken,
            f"The loader of this rank has ended after {taken} batches: had those of the others"
            f" more? {_REMEDY}",
        )
        if len(set(found)) > 1:
            self._refuse("The passes of the ranks differ in length", found)

    def left(self) -> None:
        """This rank has left its pass by a break, as all ranks have to, or by an error of its own.

        Before functions run that are due after it: they may hold collectives.

        Raises:
            RankLost: Where the others have not: nothing of this pass is to follow then.
        """
        self._exchange.give("the end of a pass that was left", lambda: None, within_s=_LEFT_S)

    def _given(self, what: str, value: int | None, hint: str = "") -> list[int | None]:
        try:
            return self._exchange.give(what, lambda: value)
        except RankLost as error:
            self._leaving.give_up(RankLost(". ".join(filter(None, (str(error), hint)))))
        except ENDS as error:
            self._leaving.give_up(error)

    def _refuse(self, what: str, found: list[int | None]) -> None:
        by_length = {length: rank for rank, length in enumerate(found) if length is not None}
        least, most = min(by_length), max(by_length)
        problem = (
            f"{what}: rank {by_length[least]} has {least} batches, rank {by_length[most]} has"
            f" {most}. {_REMEDY}."
        )
        self._leaving.give_up(ConfigError([problem], "The data of this job"))
