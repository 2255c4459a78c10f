"""Detects whether the `state_dict` of a loader contains its position in the pass.

Many loaders save something else, for example the generator they shuffle with. Loading such a state
does not restore the position, and the pass would start from its first batch. Two batches show it:
a position differs after each. Until then a resume iterates from the start of the pass.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

from forge import messages
from forge.checkpoint.format.codec import fingerprint
from forge.data import loaders
from forge.errors import CheckpointError, ConfigError
from forge.state import rng
from forge.state.adapters import read_state


class Kind(Enum):
    """Whether the loader or forge restores its position."""

    stateful = "stateful"
    """The loader, by its `state_dict`."""
    unproven = "unproven"
    """Perhaps the loader: unknown until its first two batches."""
    replayed = "replayed"
    """forge, which counts the batches."""


class Proof:
    """The finding for one loader.

    Args:
        loader: Any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.kind = Kind.unproven if loaders.has_state(loader) else Kind.replayed
        if self.kind is Kind.unproven and loaders.is_known_state(loader):
            self.kind = Kind.stateful
        self.is_open = self.kind is not Kind.replayed
        """Whether to read the loader's state after the next batch."""
        self._before: str | None = None
        """Fingerprint of the state before the first batch; None: it could not be read."""
        self._last: str | None = None
        """Fingerprint of the state after the last batch."""

    def begin_pass(self, random_state: dict[str, Any]) -> Any:
        """Read the state before the first batch, unless the finding is known already.

        Args:
            random_state: Restored afterwards: reading the state can make an iterator, which draws.
        Returns:
            The state; None if there is none.
        """
        if self.kind is not Kind.unproven or self._last is not None:
            return None
        try:
            state = copy.deepcopy(self._loader.state_dict())
        except Exception:  # noqa: BLE001 - many can say it only once there is an iterator
            return None
        finally:
            rng.restore(random_state)
        self._before = self._fingerprint(state)
        return state

    def again(self, taken: int, before: Any) -> None:
        """Continue after a new process has taken the first batches again."""
        self._before = self._fingerprint(before) if before is not None else None
        self._last = self._fingerprint(self._loader.state_dict()) if taken == 1 else None

    def check_batch(self, name: str, taken: int) -> None:
        """Read the state after a batch.

        Args:
            name: Name of the loader, for messages.
            taken: Batches taken in the pass.
        Raises:
            ConfigError: If the loader raises.
        """
        state = read_state(name, self._loader)
        if self.kind is Kind.unproven:
            now = self._fingerprint(state)
            if taken == 1:
                self._last = now
                return
            if self._last in (now, self._before):
                self.demote(name)
        self.accept()
        self.is_open = False

    def _fingerprint(self, state: Any) -> Any:
        try:
            return fingerprint(state)
        except CheckpointError as error:
            what = f"{type(self._loader).__name__}.state_dict(): {error}"
            raise ConfigError([what], "The data of this job") from error

    def accept(self) -> None:
        """Accept the state as the position, because nothing contradicts it."""
        if self.kind is Kind.unproven:
            self.kind = Kind.stateful

    def demote(self, name: str) -> None:
        """Stop using the state as the position, and warn."""
        self.kind, self.is_open = Kind.replayed, False
        messages.warn(
            f"{name}: {type(self._loader).__name__}.state_dict() is the same before and after a"
            " batch, so it does not contain the position of the loader. A resumed job reads the"
            " loader again from the start of the pass and skips the batches already used: this is"
            " exact only if the loader then yields the same batches. To save the position, count"
            " each batch in state_dict() before the loader returns it"
        )
