"""How much of its time a rank waits for the others: the slowest of them waits least.

    rank 0  | data | forward | backward |.......... wait .........| sum |
    rank 1  | data | forward | backward |.......... wait .........| sum |
    rank 2  | data | forward ----------------- | backward --------| sum |     the slow one

All ranks take the same time for a step, since they sum their gradients up together; what differs is
how long each waits in there. DistributedDataParallel measures that by itself, so that nothing is
added to a step: no hook, no clock, no synchronisation. What else a rank spends its time on (data,
the optimizer, Python) needs no clock then either: it is what it does not wait.

Other models are not measured: those of FSDP2, and those whose buffers DDP broadcasts before each
forward. There ranks wait for each other before their gradients, too; only hooks in the model could
tell how long, and these change what torch.compile makes of it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forge.compat import of_torch

NUM_LOOKS = 5
"""Looks that a share is the median of: a save or an evaluation of one rank falls into one."""
_NUM_FIRST, _EVERY = 10, 100
"""DDP measures the first so many steps, then each so-many-th."""


@dataclass
class _Look:
    step: int
    wait_s: float
    """A mean over the steps measured so far."""
    began: float


class Pace:
    """What one rank's models wait.

    Args:
        objects: What the run was given; the modules of it that sum gradients are found.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        from torch import nn

        modules = [m for one in objects if isinstance(one, nn.Module) for m in one.modules()]
        found: list[Any] = [
            m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)
        ]
        # Rank 0 waits in a broadcast for the slowest, and seems to be slow itself.
        is_clear = not any(ddp.will_sync_module_buffers() for ddp in found)
        self._models = [_Model(ddp) for ddp in found] if is_clear else []
        self.num_rounds = 0
        """How often the ranks have compared theirs."""

    def waiting(self) -> float | None:
        """Look once more; in one thread.

        Returns:
            The share of the last minutes that this rank has waited for others, from 0 to 1; None
            where nothing is measured, or not often enough.
        """
        shares = [model.waiting() for model in self._models]
        known = [share for share in shares if share is not None]
        return min(sum(known), 1.0) if known and len(known) == len(shares) else None


class _Model:
    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._last: _Look | None = None
        self._shares: deque[float] = deque(maxlen=NUM_LOOKS)

    def waiting(self) -> float | None:
        measured = of_torch.gradient_waits(self._ddp)
        if measured is not None:
            self._take(_Look(*measured))
        is_enough = len(self._shares) == NUM_LOOKS
        return statistics.median(self._shares) if is_enough else None

    def _take(self, now: _Look) -> None:
        # The first steps are no measure: kernels are chosen, and functions compiled.
        if now.step <= _NUM_FIRST:
            return
        last, self._last = self._last, now
        if last is None or now.began <= last.began:  # the same one, or the clock was set back
            return
        before, after = _num_measured(last.step, now.step)
        wait_s = (now.wait_s * after - last.wait_s * before) / (after - before)
        step_s = (now.began - last.began) / (now.step - last.step)
        self._shares.append(min(max(wait_s / step_s, 0.0), 1.0))


def _num_measured(*steps: int) -> list[int]:
    """Of how many steps each mean is; where DDP was given another rate, in proportion to that."""
    is_usual = all(step % _EVERY == 0 for step in steps)
    return [_NUM_FIRST + step // _EVERY if is_usual else step for step in steps]
