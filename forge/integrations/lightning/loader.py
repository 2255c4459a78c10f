"""The training data of a Trainer under forge: each request for a batch can be a step boundary.

Lightning asks for a batch only when everything of the step before is done: optimizer, schedules,
logging, validation, callbacks, its own checkpoints. At the end of a batch no hook says that.
"""

from __future__ import annotations

from typing import Any, Protocol

from forge.compat import of_lightning
from forge.integrations.lightning.package import CombinedLoader


class Driver(Protocol):
    """The callback that decides which batch comes next."""

    @property
    def drives(self) -> bool:
        """Whether the training loop of a Run reads the loader."""

    def begin_pass(self, loader: DrivenLoader) -> None:
        """The Trainer makes an iterator: a pass begins, or is continued after a resume."""

    def next_batch(self, loader: DrivenLoader) -> Any:
        """The next batch; raises StopIteration at the end of the pass."""


class DrivenLoader(CombinedLoader):
    """The loaders of a script, in a form in which Lightning still prepares each of them.

    Args:
        driver: Is asked for each batch of the training.
        loader: A DataLoader, a collection of loaders, or a CombinedLoader.
    """

    def __init__(self, driver: Driver, loader: Any) -> None:
        is_combined = isinstance(loader, CombinedLoader)
        self.mode = of_lightning.mode_of(loader) if is_combined else "max_size_cycle"
        super().__init__(loader.iterables if is_combined else loader, self.mode)
        self._driver, self._is_driven = driver, False
        self.ahead = 0
        """Batches that Lightning fetches ahead: one if it does not know how many there are."""

    def __len__(self) -> int:
        return of_lightning.length_of(self, self.mode)

    def __iter__(self) -> DrivenLoader:
        self._is_driven = self._driver.drives
        if self._is_driven:
            self.ahead = 0 if self._has_length() else 1
            self._driver.begin_pass(self)
        else:
            super().__iter__()
        return self

    def _has_length(self) -> bool:
        try:
            return len(self) >= 0
        except (TypeError, NotImplementedError):
            return False

    def __next__(self) -> Any:
        return (self._driver.next_batch(self), 0, 0) if self._is_driven else super().__next__()
