"""Lets the code before a pass see the same values when the job resumes later in the epoch.

Random states and the values of `run.state` are kept when an epoch begins, and saved with each of
its checkpoints. So if the code before the pass builds a sampler from values that the pass changes,
a resumed job builds the same sampler.
"""

from __future__ import annotations

from forge import messages
from forge.state import rng
from forge.state.run_state import RunState, copied
from forge.training.loop.loop_progress import LoopProgress

MAX_BYTES = 64 << 20
"""Largest `run.state` that is kept, in bytes."""


class EpochStart:
    """The start of the current epoch.

    Args:
        loops: The current step and loop.
        own: `run.state`.
    """

    def __init__(self, loops: LoopProgress, own: RunState) -> None:
        self._loops = loops
        self._own = own
        self._is_told = False

    def note(self) -> None:
        """Keep the values when an epoch begins."""
        loops, epochs = self._loops, self._loops.epochs
        assert epochs is not None
        epochs.rng, epochs.step = rng.capture(), loops.step
        epochs.values = copied(self._own.capture(), MAX_BYTES)
        self._tell(is_large=epochs.values is None)

    def _tell(self, *, is_large: bool) -> None:
        if is_large and not self._is_told:
            self._is_told = True
            messages.warn(
                f"run.state is larger than {MAX_BYTES / 2**20:g} MiB, so forge does not keep a copy"
                " of it when an epoch begins. If the job resumes in the middle of an epoch, your"
                " code between `run.epochs` and `run.batches` runs again, and finds run.state as it"
                " was at the save, not as at the start of the epoch. So that code must not read"
                " entries that the loop over `run.batches` changes. Or keep less in run.state."
            )

    def go_back(self) -> None:
        """The job resumes in this epoch: restore the values from its start."""
        loops, epochs = self._loops, self._loops.epochs
        assert epochs is not None
        loops.step = epochs.step
        self._tell(is_large=epochs.values is None)
        if isinstance(epochs.values, dict):
            self._own.restore(copied(epochs.values) or {})
        rng.restore(epochs.rng)
