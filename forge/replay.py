"""A stop inside a step: where an exact state is, between two boundaries.

A long evaluation lies inside a step, after its update. To stop there, the state after the update
is saved together with the batch; when the job goes on, the step is run once more up to its
update, where the saved state takes over. That is exact as long as nothing that is saved has
changed since the mark, which the tensors' version counters tell.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from forge import rng
from forge.live_state import LiveState
from forge.update import Updater

_UNCHANGED_BY_EVALUATION = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


_SLOW_S = 0.005
"""A step of this length is marked without being asked: a mark costs about 1 % of it."""


class Marker:
    """Remembers the random state and the tensors' versions at the last exact moment."""

    def __init__(self, live: LiveState, updater: Updater) -> None:
        self._live = live
        self._updater = updater
        modules = [one for one in live.objects.values() if isinstance(one, torch.nn.Module)]
        self._tensors = [t for m in modules for t in [*m.parameters(), *m.buffers()]]
        self._began = 0.0
        self.is_used = False
        """Whether this run polls at all: then every step is marked."""
        self.rng: dict[str, Any] = {}
        self._versions = -1

    def begin(self) -> None:
        """A step begins, with the boundary's state."""
        self._began = time.monotonic()
        self.rng = {}
        if self.is_used:
            self._mark()

    def updated(self) -> None:
        """The step's update has just been done."""
        if self.is_used or time.monotonic() - self._began >= _SLOW_S:
            self._mark()

    def _mark(self) -> None:
        self.rng = rng.capture()
        self._versions = self._count_versions()

    def is_exact(self) -> bool:
        """Whether the state is still that of the mark."""
        return (
            bool(self.rng)
            and not self._updater.is_guarded
            and all(isinstance(o, _UNCHANGED_BY_EVALUATION) for o in self._live.objects.values())
            and all(p.grad is None for _, p in self._live.parameters())
            and self._versions == self._count_versions()
        )

    def _count_versions(self) -> int:
        return sum(t._version for t in self._tensors)
