"""Lets the code before a pass see the same values when the job resumes later in the epoch.

Random states, the positions of `run.loader` and the values of `run.state` are kept when an epoch
begins, and saved with each of its checkpoints. So if the code before the pass builds a sampler
from values that the pass changes, a resumed job builds the same sampler.
"""

from __future__ import annotations

import copy

from forge import messages
from forge.state import rng
from forge.state.run_state import RunState, copied
from forge.training.loop.loop_state import LoopState

MAX_BYTES = 64 << 20
"""Largest `run.state` that is kept, in bytes."""


class EpochStart:
    """The start of the current epoch.

    Args:
        loops: The current step and loop.
        own: `run.state`.
    """

    def __init__(self, loops: LoopState, own: RunState) -> None:
        self._loops = loops
        self._own = own
        self._is_told = False

    def note(self) -> None:
        """Keep the values when an epoch begins."""
        loops, place = self._loops, self._loops.place
        assert place is not None
        place.rng, place.step = rng.capture(), loops.step
        place.loaders = copy.deepcopy(loops.loaders.capture())
        place.values = copied(self._own.capture(), MAX_BYTES)
        self._tell(is_large=place.values is None)

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
        loops, place = self._loops, self._loops.place
        assert place is not None
        loops.step = place.step
        loops.loaders.load(place.loaders)
        self._tell(is_large=place.values is None)
        if isinstance(place.values, dict):
            self._own.restore(copied(place.values) or {})
        rng.restore(place.rng)
