"""A loop that somebody else owns, and that calls `run.boundary` between two of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from forge.data.resumable import Resumable
from forge.errors import ConfigError, ForgeError
from forge.state import rng
from forge.training import misuse
from forge.training.boundary import Boundary
from forge.training.loop.loop_state import LoopState
from forge.training.metrics import Metrics
from forge.training.nan.update import Updater
from forge.training.start import preflight


class Start(NamedTuple):
    """Where a loop begins."""

    step: int
    """Steps done by earlier attempts."""
    epoch: int
    """The epoch that was last given to `run.boundary`; 0 at first."""
    is_resumed: bool
    """Whether a checkpoint of this loop was loaded."""
    is_finished: bool
    """Whether this loop had ended: then there is nothing left to train."""


class PushedLoop:
    """The loop between `Run.begin` and `Run.end_loop`."""

    def __init__(
        self,
        loops: LoopState,
        boundary: Boundary,
        updater: Updater,
        metrics: Metrics,
        objects: Mapping[str, Any],
    ) -> None:
        self._loops = loops
        self._boundary = boundary
        self._updater = updater
        self._metrics = metrics
        self._loaders = {n: one for n, one in objects.items() if isinstance(one, Resumable)}
        self._is_open = False

    def begin(self) -> Start:
        """See `Run.begin`."""
        loops = self._loops
        if loops.positions:
            raise ForgeError(misuse.BEGIN_AFTER_A_LOOP)
        loops.enter_pushed()
        epoch, is_resumed = loops.epoch, loops.is_resumed
        if is_resumed:
            # What the trainer has done to the objects since the block was entered.
            self._boundary.put_back()
            assert loops.loaded is not None
            rng.restore(loops.loaded["rng"])
        is_finished = loops.is_over(math.inf) or loops.is_complete
        start = Start(loops.step, epoch, is_resumed, is_finished)
        if is_finished:
            loops.pass_over()
            if not loops.is_complete:
                self._boundary.run_end.end_loop()
            return start
        for one in self._loaders.values():
            loops.watch(one.loader, one.inexact())
        loops.fixed.begin_loop()
        loops.planned, loops.is_complete, loops.is_between = None, False, False
        self._boundary.run_end.begin_loop()
        self._boundary.begin()
        if not self._boundary.pass_through(None, math.inf):
            self._begin_step()
        return start

    def _begin_step(self) -> None:
        self._updater.begin(self._loops.step)
        self._metrics.begin(self._loops.step)
        self._is_open = self._loops.is_in_step = True

    def _end_step(self) -> None:
        self._loops.is_in_step = False
        self._updater.settle()

    def boundary(self, step: int, epoch: int, taken: int | Mapping[str, int] | None) -> bool:
        """See `Run.boundary`."""
        loops = self._loops
        misuse.check_boundary(step, loops.step, is_open=self._is_open)
        with preflight.exits():
            self._check_loaders(taken)
        self._end_step()
        loops.step, loops.due = step, None
        loops.note_epoch(epoch)
        if self._boundary.pass_through(None, math.inf):
            self._leave()
            return True
        self._begin_step()
        return False

    def _check_loaders(self, taken: int | Mapping[str, int] | None) -> None:
        """Refuse a loop that has taken other batches than it has trained on."""
        if not self._loaders:
            return
        names = list(self._loaders)
        if taken is None or (isinstance(taken, int) and len(names) > 1):
            form = f"{{{names[0]!r}: …}}" if len(names) > 1 else "…"
            raise ConfigError(
                [
                    f"run.boundary(…, taken={taken}): expected the number of batches trained on so"
                    f" far, of each loader given to forge.Run ({', '.join(names)}). Write"
                    f" `run.boundary(step, taken={form})`, with the loop's own count."
                ],
                "The training loop",
            )
        used = taken if isinstance(taken, Mapping) else {names[0]: taken}
        for name, one in self._loaders.items():
            if used.get(name) != one.taken:
                raise ConfigError(
                    [
                        f"{name}: the loop has trained on {used.get(name)} batches, but has taken"
                        f" {one.taken} from forge.data.resumable. It reads ahead, so a resume would"
                        " lose the batches in between: wrap the loader that it reads inside (of"
                        " Accelerate: `base_dataloader`), or switch the reading ahead off."
                    ],
                    "The training loop",
                )
            one.check(f"the loader `{name}`")

    def end(self, reason: str) -> None:
        """See `Run.end_loop`."""
        if not self._is_open:
            return
        self._end_step()
        loops = self._loops
        loops.finished_by = reason
        loops.break_off()
        self._boundary.run_end.save_anew()
        self._boundary.pass_through(None, loops.step, has_ended=False)
        self._leave()

    def _leave(self) -> None:
        self._is_open = False
        self._metrics.begin(self._loops.step)
        self._updater.begin(self._loops.step)
        self._loops.leave()
