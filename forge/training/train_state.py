"""Everything that a checkpoint contains: capturing and restoring it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from forge.checkpoint import Checkpoint
from forge.checkpoint.format.codec import Encoder
from forge.checkpoint.host_memory import digest
from forge.jobdir.ledger import Ledger
from forge.process import sections
from forge.process.progress import Phase
from forge.state import rng
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState, copied
from forge.training.loop.loop_state import LoopState
from forge.training.metrics import Metrics
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater
from forge.training.start.checkpoint_owner import CheckpointOwner


class TrainState:
    """All state of a run, captured together at a step boundary.

    Args:
        live: The objects that were given to `forge.Run`.
        own: `run.state`.
        loops: The current step and loop.
        nan: Counters of the NaN policy.
        updater: How far the scales of the GradScalers have fallen.
    """

    def __init__(
        self, live: StateRegistry, own: RunState, loops: LoopState, nan: NanPolicy, updater: Updater
    ) -> None:
        self.live = live
        self._own = own
        self._loops = loops
        self._nan = nan
        self._updater = updater

    def belongs_to(self, owner: CheckpointOwner, ledger: Ledger, metrics: Metrics) -> None:
        """Set the job: loaded state is adapted to its config, and its metrics are restored."""
        self._owner = owner
        self._ledger = ledger
        self._metrics = metrics

    def capture(self) -> dict[str, Any]:
        """Everything that a checkpoint contains."""
        self._metrics.flush()
        self.live.check_groups()
        self._updater.settle()
        live = self.live.capture()
        self.check_own(live)
        loops, own = self._loops.capture(), self._own.capture()
        epochs = loops["epochs"]
        if epochs and epochs["values"] and _fingerprint(epochs["values"]) == _fingerprint(own):
            epochs["values"] = True  # saved once
        return {
            "live": live,
            "nan": self._nan.state_dict(),
            "overflows": self._updater.overflows.state_dict(),
            **loops,
            "metrics": self._metrics.latest(),
            "rng": rng.capture(),
            **own,
        }

    def check_own(self, live: dict[str, Any] | None = None) -> None:
        """Refuse objects that `run.state` shares with the given objects, or contains twice.

        Args:
            live: Captured states of the given objects; by default they are captured now.
        Raises:
            CheckpointError: Names both places.
        """

        def saved() -> dict[str, Any]:
            if live is None:
                return self.live.ask()
            return {**live["states"], "unregistered": live["unregistered"], ".grad": live["grads"]}

        self._own.check_alone(self.live.given, saved)

    @sections.in_section(Phase.save, "compare")
    def fingerprint(self) -> str:
        """A hash of the objects and `run.state`, without random states and data positions."""
        return _fingerprint({"live": self.live.capture(), **self._own.capture()})

    def load(self, found: Checkpoint) -> None:
        """Restore everything except the random state, which each loop restores when it begins.

        Raises:
            StateMismatch: If the checkpoint does not fit the objects.
        """
        state = found.state
        self.live.prepare(state["live"])
        owned = found.fill()
        self._owner.adapt(state["live"]["states"], found.manifest.job, self._ledger)
        self.live.load(state["live"], owned)
        self._nan.load_state_dict(state["nan"])
        self._updater.overflows.load_state_dict(state["overflows"])
        self._metrics.restore(state["metrics"])
        self._loops.load(state)
        place = self._loops.place
        if place is not None and place.values is True:
            place.values = copied({name: state[name] for name in self._own.capture()})
        self._own.restore(state)


def _fingerprint(state: dict[str, Any]) -> str:
    """A hash that is equal for equal values."""
    encoder = Encoder()
    found = hashlib.blake2b(json.dumps(encoder.encode(state)).encode(), digest_size=16)
    for name, tensor in encoder.tensors.items():
        found.update(f"{name} {digest(tensor)}".encode(errors="replace"))
    return found.hexdigest()
