"""Checks that all ranks do the same number of steps, in a loop and in a pass of `run.batches`.

A rank that ends first would leave the others waiting in a collective. Before the first step the
ranks compare `n`, and the lengths of their loaders in a pass. If a loader has no length, a rank
that reaches the end of its pass waits there for the others before the code after the pass runs.
After a `break` the ranks compare the step: if a rank has left its loop alone, all ranks exit.
`run.finish` ends the loop of all ranks after the same step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NoReturn

from forge.errors import ConfigError, ForgeError, RankLost
from forge.group import requests
from forge.group.requests import FinishRequest
from forge.training.parts import Parts

_REMEDY = (
    "Every rank needs the same number of batches: share the samples by a"
    " forge.data.GlobalBatchSampler or a torch.utils.data.DistributedSampler, or let all ranks end"
    " after as many batches as the shortest loader has"
)

_TOGETHER = (
    "All ranks have to leave a loop after the same step: let them decide by a value that is equal"
    " on all of them, for example one that torch.distributed.all_reduce returns, or call run.finish"
    " in a function of run.every"
)

LEFT_S = 30.0
"""Largest delay between ranks, in seconds, at a break after the same step."""
_LOST_S = 2.0
"""Seconds until this rank knows which rank is gone, after a connection to it has failed."""


class LoopLengths:
    """Compares the lengths of the ranks' loops and passes."""

    def __init__(self, parts: Parts) -> None:
        self._group = parts.group
        self._exchange = parts.exchange
        self._loops = parts.loops
        self._shutdown = parts.shutdown
        self._finish: FinishRequest | None = None
        """The call of `run.finish` on this rank, until the ranks have exchanged it."""
        self._is_known = True
        self._num_left = 0
        self._left: bytes | None = None
        """The step after which this rank left its loop, until the ranks have compared it."""
        stop_s = parts.policy.stop_s or math.inf
        self._left_s = min(LEFT_S, stop_s / 2)
        """Seconds to wait for the others: half of a stop, so that they can end in its time too."""

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

    def note_left(self) -> None:
        """This rank leaves its loop: by a break or an error, which look the same, or `end_loop`.

        Only tells the other ranks, since they can already be gone. `check_left` compares.
        """
        self._num_left += 1
        self._left = str(self._loops.step).encode()
        with contextlib.suppress(RankLost):  # if it was an error, its cause can be the same
            self._group.publish(self._key, self._left)

    def check_left(self) -> None:
        """Check that all ranks have left the loop as this rank has, where it next calls forge.

        Raises:
            ConfigError: If a rank has not, or after another step.
            RankLost: If a rank is gone.
        """
        left, self._left = self._left, None
        if left is None:
            return
        try:
            found = self._group.gather(self._key, left, self._left_s)
        except RankLost as error:
            if self._group.lost(_LOST_S):
                raise
            self._raise(
                f"rank {self._group.rank} has left its loop after {self._loops.step} steps (by a"
                f" `break`, a caught error or run.end_loop), but not all ranks have: {error}"
            )
        if len(set(found)) > 1:
            steps = ", ".join(f"rank {r} after {one.decode()} steps" for r, one in enumerate(found))
            self._raise(f"the ranks have left their loops after different steps: {steps}")

    def finish(self, request: FinishRequest, *, is_in_function: bool) -> None:
        """Handle a call of `run.finish`, which `share_finish` tells the other ranks.

        A proposal of one rank takes effect at a boundary that depends on the clock, but the number
        of steps of a training must not depend on the clock.

        Args:
            request: The call.
            is_in_function: Whether a function of `run.every`, or the code after a pass, is running.
        Raises:
            ForgeError: In a step.
        """
        if not is_in_function:
            raise ForgeError(
                "run.finish() was called inside a step, but this is one of"
                f" {self._group.size} ranks, which must all end after the same step: call it in a"
                " function of run.every, or after an epoch's pass."
            )
        self._finish = request

    def share_finish(self, unless: Callable[[], object]) -> None:
        """Exchange calls of `run.finish` where all ranks meet: after functions, or after a pass.

        Args:
            unless: Whether the ranks stop at this boundary: then they do not wait for each other.
        """
        request, self._finish = self._finish, None
        text = None if request is None else requests.to_text(request)
        with self._shutdown.giving_up():
            texts = self._exchange.all_gather("the end of a function", lambda: text, unless)
        for one in texts:
            if one is not None:
                self._group.adopt(requests.from_text(one))

    @property
    def _key(self) -> str:
        return f"the end of a loop that a rank left ({self._num_left})"

    @staticmethod
    def _raise(problem: str) -> NoReturn:
        raise ConfigError([f"{problem}. {_TOGETHER}"], "The training loop")

    def _given(self, what: str, value: int | None, hint: str = "") -> list[int | None]:
        with self._shutdown.giving_up():
            try:
                return self._exchange.all_gather(what, lambda: value)
            except RankLost as error:
                raise RankLost(". ".join(filter(None, (str(error), hint)))) from error

    def _refuse(self, what: str, found: list[int | None]) -> None:
        by_length = {length: rank for rank, length in enumerate(found) if length is not None}
        least, most = min(by_length), max(by_length)
        problem = (
            f"{what}: rank {by_length[least]} has {least} batches, rank {by_length[most]} has"
            f" {most}. {_REMEDY}."
        )
        self._shutdown.give_up(ConfigError([problem], "The data of this job"))
