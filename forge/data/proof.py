"""Whether the `state_dict` of a loader is its place in the pass.

Many a loader has one that holds something else: the generator it shuffles with, say. To load it
does not bring the loader to its place, and the pass would begin anew. It shows while two batches
are taken: a place is another one after each. Until then a resume makes the pass once more.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

from forge import messages
from forge.data import loaders
from forge.state import rng
from forge.state.registry import asked
from forge.state.variables import fingerprint


class Kind(Enum):
    """Who knows the place of a loader."""

    stateful = "stateful"
    """The loader, by its `state_dict`."""
    unproven = "unproven"
    """Perhaps the loader: its first two batches will tell."""
    replayed = "replayed"
    """Forge, which counts the batches."""


class Proof:
    """That of one loader.

    Args:
        loader: Any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.kind = Kind.unproven if loaders.has_state(loader) else Kind.replayed
        if self.kind is Kind.unproven and loaders.is_known_state(loader):
            self.kind = Kind.stateful
        self.is_open = self.kind is not Kind.replayed
        """Whether the loader is still to be asked for its state."""
        self._before: str | None = None
        """The state before the first batch, as a fingerprint; None: it could not be asked for."""
        self._last: str | None = None
        """After the batch before this one."""

    def begin(self, random_state: dict[str, Any]) -> Any:
        """Ask for the state before the first batch, unless something is known of it already.

        Args:
            random_state: To be put back: to be asked may make an iterator, which draws.
        Returns:
            The state; None without one.
        """
        if self.kind is not Kind.unproven or self._last is not None:
            return None
        try:
            state = copy.deepcopy(self._loader.state_dict())
        except Exception:  # noqa: BLE001 - many can say it only once there is an iterator
            return None
        finally:
            rng.restore(random_state)
        self._before = fingerprint(state)
        return state

    def again(self, taken: int, before: Any) -> None:
        """The first batches were taken once more, in a new process."""
        self._before = fingerprint(before) if before is not None else None
        self._last = fingerprint(self._loader.state_dict()) if taken == 1 else None

    def took(self, name: str, taken: int) -> None:
        """Ask for the state after a batch.

        Args:
            name: Of the loader, for people.
            taken: Batches of the pass.
        Raises:
            ConfigError: Where the loader raises.
        """
        state = asked(name, self._loader)
        if self.kind is Kind.unproven:
            now = fingerprint(state)
            if taken == 1:
                self._last = now
                return
            if self._last in (now, self._before):
                self.demote(name)
        self.accept()
        self.is_open = False

    def accept(self) -> None:
        """Nothing speaks against it."""
        if self.kind is Kind.unproven:
            self.kind = Kind.stateful

    def demote(self, name: str) -> None:
        """It is none: say so."""
        self.kind, self.is_open = Kind.replayed, False
        messages.warn(
            f"{name}: {type(self._loader).__name__}.state_dict() is the same before and after a"
            " batch, so it is not the loader's place in the pass. A resume iterates it again from"
            " the start of the pass and leaves out what was taken, which is exact only if it yields"
            " the same each time from the state that it had then. To go there, let the state hold"
            " how many batches of the pass were taken, counted before each is handed out"
        )
