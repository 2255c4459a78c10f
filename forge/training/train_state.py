"""Everything that a checkpoint contains: capturing and restoring it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.checkpoint.format.codec import fingerprint
from forge.group.requests import Watcher
from forge.process import sections
from forge.process.progress import Phase
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState, copied
from forge.training.loop.loop_progress import LoopProgress
from forge.training.loop.loop_state import LoopState
from forge.training.nan.update import Updater
from forge.training.start.attempt_io import AttemptIO
from forge.training.start.checkpoint_owner import CheckpointOwner

if TYPE_CHECKING:
    from forge.checkpoint.reading import Checkpoint


class TrainState(Watcher):
    """All state of a run, captured together at a step boundary.

    Args:
        live: The objects that were given to `forge.Run`.
        own: `run.state`.
        loops: The current step and loop.
        updater: Counters of the NaN policy; how far the scales of the GradScalers have fallen.
        owner: Adapts loaded state to the job's config.
        directory: The ledger, and the metrics that are saved too.
    """

    def __init__(
        self,
        live: StateRegistry,
        own: RunState,
        loops: LoopProgress,
        updater: Updater,
        owner: CheckpointOwner,
        directory: AttemptIO,
    ) -> None:
        self.live = live
        self._own = own
        self._loops = loops
        self._updater = updater
        self._owner = owner
        self._ledger = directory.ledger
        self._metrics = directory.metrics

    def request(self, step: int) -> None:
        """Refuse, at each boundary, a change that no checkpoint could restore.

        Raises:
            ConfigError: Names it.
        """
        self.live.check_groups()
        self._loops.fixed.check()

    def capture(self) -> dict[str, Any]:
        """Everything that a checkpoint contains."""
        self._metrics.flush()
        self.live.check_groups()
        self._updater.settle()
        live = self.live.capture()
        self.check_own(live)
        loops, own = self._loops.capture(), self._own.capture()
        epochs = loops.epochs
        values = epochs.values if epochs is not None else None
        if epochs and isinstance(values, dict) and fingerprint(values) == fingerprint(own):
            epochs.values = True  # saved once
        return {
            "live": live,
            **self._updater.state_dict(),
            **loops.stored(),
            **self._metrics.capture(),
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
                return self.live.read_states()
            return {**live["states"], "unregistered": live["unregistered"], ".grad": live["grads"]}

        self._own.check_alone(self.live.given, saved)

    @sections.in_section(Phase.save, "compare")
    def fingerprint(self) -> str:
        """A hash of the objects and `run.state`, without random states and data positions."""
        return fingerprint({"live": self.live.capture(), **self._own.capture()})

    def load(self, found: Checkpoint) -> None:
        """Restore everything except the random state, which each loop restores when it begins.

        Raises:
            StateMismatch: If the checkpoint does not fit the objects.
        """
        from forge.state import restoring  # a fresh start restores nothing

        state = found.state
        restoring.prepare(self.live, state["live"])
        owned = found.fill()
        self._owner.adapt(state["live"]["states"], found.manifest.job, self._ledger)
        restoring.load(self.live, state["live"], owned)
        self._updater.load_state_dict(state)
        self._metrics.restore(state)
        self._loops.load(LoopState.of(state))
        epochs = self._loops.epochs
        if epochs is not None and epochs.values is True:
            epochs.values = copied({name: state[name] for name in self._own.capture()})
        self._own.restore(state)
