"""What the code before a pass sees: all of it as the epoch began, also if the job resumes later.

Random states, the loaders of `run.loader` and the values of `run.state` are kept as an epoch begins
and saved with each checkpoint of it. A sampler that is built before the pass from what the pass
changes is so built from the same values at a resume.
"""

from __future__ import annotations

import copy

from forge import messages
from forge.state import rng
from forge.state.run_state import RunState, copied
from forge.training.loop.loops import Loops

MAX_BYTES = 64 << 20
"""Bytes of `run.state` that are kept."""


class EpochStart:
    """The start of the epoch that is under way.

    Args:
        loops: Where the run is.
        own: `run.state`.
    """

    def __init__(self, loops: Loops, own: RunState) -> None:
        self._loops = loops
        self._own = own
        self._is_told = False

    def note(self) -> None:
        """An epoch begins."""
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
                f"run.state is larger than {MAX_BYTES / 2**20:g} MiB, so it is not kept as each"
                " epoch begins. If the job resumes in a pass, the code before the pass runs again,"
                " and sees run.state as it was at the save: that code must not read what the pass"
                " changes."
            )

    def go_back(self) -> None:
        """The job resumes in this epoch: put back what its start had."""
        loops, place = self._loops, self._loops.place
        assert place is not None
        loops.step = place.step
        loops.loaders.load(place.loaders)
        self._tell(is_large=place.values is None)
        if isinstance(place.values, dict):
            self._own.restore(copied(place.values) or {})
        rng.restore(place.rng)
