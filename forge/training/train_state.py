"""Everything that a checkpoint contains: capturing it, finding the checkpoint, restoring it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge import messages
from forge.checkpoint.format.encoding import fingerprint
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
    from pathlib import Path

    from forge.checkpoint.reading import Checkpoint, Offers


class TrainState(Watcher):
    """All state of a run, captured together at a step boundary.

    Args:
        live: The objects that were given to `forge.Run`.
        own: `run.state`.
        loops: The current step and loop.
        updater: Counters of the NaN policy; how far the scales of the GradScalers have fallen.
        owner: Refuses checkpoints of other jobs.
        directory: The checkpoints, the ledger, and the metrics that are saved too.
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
        self._store = directory.store
        self._config = directory.config
        self._ranks = directory.ranks
        self._ledger = directory.ledger
        self._metrics = directory.metrics
        self._resumed: Path | None = None
        """The checkpoint that this attempt resumed from."""

    def request(self, step: int) -> None:
        """Refuse, at each boundary, a change that no checkpoint could restore.

        Raises:
            ConfigError: Names it.
        """
        self._loops.fixed.check()

    def capture(self) -> dict[str, Any]:
        """Everything that a checkpoint contains."""
        self._metrics.flush()
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
            return {**live["states"], ".grad": live["grads"]}

        self._own.check_alone(self.live.given, saved)

    @sections.in_section(Phase.save, "compare")
    def fingerprint(self) -> str:
        """The `digest`, as part of a save."""
        return self.digest()

    def digest(self) -> str:
        """A hash of the objects and `run.state`, without random states and data positions."""
        return fingerprint({"live": self.live.capture(), **self._own.capture()})

    # -- finding and restoring a checkpoint ----------------------------------------------------

    def resume(self) -> Checkpoint | None:
        """Load the newest checkpoint that verifies, if there is one; logs why others were skipped.

        Raises:
            CheckpointError: If no checkpoint is usable.
            StateMismatch: If the checkpoint does not fit the objects.
        """
        found = self._store.newest(offer=self._offer)
        self._log_skipped()
        if found is not None:
            self._resumed = found.path
            self._resize(found, is_new=True)
            self._note_torch(found)
            self.load(found)
        return found

    def reload(self) -> None:
        """Load the checkpoint that `resume` loaded again."""
        assert self._resumed is not None
        found = self._store.read(self._resumed, self._offer)
        self._resize(found)
        self.load(found)

    def rollback_target(self, at_most: int) -> Checkpoint | None:
        """The newest good checkpoint at a boundary with at most `at_most` steps done.

        Preferably a checkpoint that an uninterrupted run has too: not one saved by a stop.
        """
        every, newest = self._config.every_steps or 1, self._store.newest
        found = newest(at_most, every, self._offer) or newest(at_most, offer=self._offer)
        self._log_skipped()
        if found is not None:
            self._resize(found)
        return found

    def _offer(self, state: dict[str, Any]) -> Offers:
        """The targets of a checkpoint's tensors; refuses a checkpoint that cannot be loaded."""
        from forge.state import putting_back, restoring  # a fresh start restores nothing

        putting_back.check(state)
        return restoring.in_place_targets(self.live, state["live"])

    def _log_skipped(self) -> None:
        for reason in self._store.passed_over:
            messages.warn(f"Skipped {reason}")

    def _resize(self, found: Checkpoint, *, is_new: bool = False) -> None:
        """Adapt the state if another number of ranks has saved it; record and log it if new."""
        before, now = found.manifest.world_size, self._ranks.size
        if before == now:
            return
        from forge.training.start import resizing

        resizing.adapt(found, self._ranks)
        if is_new:
            self._ledger.write("resized", step=found.manifest.step, before=before, now=now)
            if self._ranks.rank == 0:
                messages.warn(resizing.described(found, now))

    def _note_torch(self, found: Checkpoint) -> None:
        """Log that another version of torch saved the checkpoint, which can give other bits."""
        before, now = found.manifest.versions.get("torch"), str(torch.__version__)
        if before not in (None, now) and self._ranks.rank == 0:
            messages.warn(
                f"{found.path.name} was saved with torch {before}, but this is torch {now}. Another"
                " version can add numbers in another order, so the result can differ in its last"
                " bits from that of a training with one version. If that matters, install torch"
                f" {before} again."
            )

    def load(self, found: Checkpoint) -> None:
        """Restore everything except the random state, which each loop restores when it begins.

        Raises:
            StateMismatch: If the checkpoint does not fit the objects.
        """
        from forge.state import restoring  # a fresh start restores nothing

        state = found.state
        restoring.prepare(self.live, state["live"])
        owned = found.fill()
        self._owner.check_known(found.manifest.job)
        restoring.load(self.live, state["live"], owned)
        self._updater.load_state_dict(state)
        self._metrics.restore(state)
        self._loops.load(LoopState.of(state))
        epochs = self._loops.epochs
        if epochs is not None and epochs.values is True:
            epochs.values = copied({name: state[name] for name in self._own.capture()})
        self._own.restore(state)
