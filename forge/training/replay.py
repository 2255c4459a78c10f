"""A stop inside a step: where an exact state is, between two boundaries.

A long evaluation lies inside a step, after its update. To stop there, the state after the update
is saved together with the batch; when the job resumes, the step is run once more up to its
update, where the saved state takes over. That is exact as long as nothing that is saved has
changed since the mark, which the tensors' version counters tell.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import torch

from forge.checkpoint import Store
from forge.state import rng
from forge.state.fingerprint import Look, Looks
from forge.state.registry import LiveState
from forge.training.metrics import Metrics
from forge.training.update import Updater

_UNCHANGED_BY_EVALUATION = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


_SLOW_S = 0.02
"""A step of this length is marked without being asked: a mark costs about 1 % of it."""


class Marker:
    """Remembers the random state, and what everything looked like, at the last exact moment."""

    def __init__(self, live: LiveState, updater: Updater) -> None:
        self._live = live
        self._updater = updater
        objects = live.objects.values()
        modules = [one for one in objects if isinstance(one, torch.nn.Module)]
        held = {id(parameter) for one in modules for parameter in one.parameters()}
        others = [parameter for _, parameter in live.parameters() if id(parameter) not in held]
        self._looks = Looks(modules, others)
        self._schedules = [
            one for one in objects if isinstance(one, torch.optim.lr_scheduler.LRScheduler)
        ]
        self._began = 0.0
        self._was_slow = False
        self.is_used = False
        """Whether this run polls at all: then every step is marked."""
        self.begin_rng: dict[str, Any] = {}
        """The random state in which the step began, if it was noted."""
        self.rng: dict[str, Any] = {}
        self._marked: tuple[Look, list[Any]] | None = None

    def begin(self) -> None:
        """A step begins, with the boundary's state."""
        self._began = time.monotonic()
        self.rng = self.begin_rng = {}
        if self.is_used:
            self.mark()
            self.begin_rng = self.rng
        elif self._was_slow:
            self.begin_rng = rng.capture()

    def updated(self) -> None:
        """The step's update has just been done."""
        self._was_slow = time.monotonic() - self._began >= _SLOW_S
        if self.is_used or self._was_slow:
            self.mark()

    def mark(self) -> None:
        """Now is an exact moment."""
        self.rng = rng.capture()
        self._marked = self._look()

    def is_exact(self) -> bool:
        """Whether the state is still that of the mark."""
        return (
            bool(self.rng)
            and not self._updater.is_guarded
            and all(isinstance(o, _UNCHANGED_BY_EVALUATION) for o in self._live.objects.values())
            and all(p.grad is None for _, p in self._live.parameters())
            and self._is_unchanged()
        )

    def _is_unchanged(self) -> bool:
        now = self._look()
        if self._marked is None or now is None:
            return False
        return self._marked[1] == now[1] and self._marked[0].is_same(now[0])

    def _look(self) -> tuple[Look, list[Any]] | None:
        """What changes when a weight, a schedule or a learning rate does; None: it is not known.

        A stop then comes at the step's end: what cannot be looked at must not end a training.
        """
        try:
            return self._looks.look(self.is_used), [
                [repr(one.state_dict()) for one in self._schedules],
                [
                    [value for value in group.values() if isinstance(value, (int, float))]
                    for optimizer in self._live.optimizers
                    for group in optimizer.param_groups
                ],
            ]
        except Exception:  # noqa: BLE001 - each kind of tensor has its own, and so has user code
            return None


class HeldBatch:
    """A batch as the loader gave it, whatever the loop does to its containers afterwards."""

    def __init__(self, batch: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._batch = self._hold(batch)
        self._needing_grad = [i for i, one in enumerate(self._tensors) if one.requires_grad]
        # What was made in inference mode does not count what is written to it; what was computed
        # from other tensors would come back without them.
        self._is_kept = all(one.is_leaf and not one.is_inference() for one in self._tensors)
        self._versions = self._count()

    def _hold(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
        elif kind in (dict, OrderedDict):
            return kind((key, self._hold(one)) for key, one in value.items())
        elif kind in (list, tuple):
            return kind(self._hold(one) for one in value)
        elif isinstance(value, tuple):  # a namedtuple
            return tuple.__new__(kind, (self._hold(one) for one in value))
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return value.copy(order="K")  # nothing counts what is written to it
        return value

    def saved(self) -> dict[str, Any]:
        """What `batch_of` makes the batch of again."""
        return {"batch": self._batch, "needing_grad": self._needing_grad}

    def is_intact(self) -> bool:
        """Whether no tensor was written to; False where it would not come back as it was."""
        return self._is_kept and self._versions == self._count()

    def _count(self) -> int:
        return sum(tensor._version for tensor in self._tensors) if self._is_kept else 0


def batch_of(replay: dict[str, Any]) -> Any:
    """The batch of a step that is repeated, with gradients asked for where the loader had."""
    tensors = HeldBatch(replay["batch"])._tensors
    for number in replay.get("needing_grad", ()):
        tensors[number].requires_grad_()
    return replay["batch"]


def replay_of(
    batch: HeldBatch, marker: Marker, updater: Updater, metrics: Metrics
) -> dict[str, Any] | None:
    """What it takes to come back into the step that is under way; None where that is not exact."""
    if not (marker.is_exact() and marker.begin_rng and batch.is_intact()):
        return None
    replay = {
        **batch.saved(),
        "begin_rng": marker.begin_rng,
        "losses": updater.losses,
        "logged": sorted(metrics.logged),
    }
    return replay if Store.is_savable(replay) else None
