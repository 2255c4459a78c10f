"""The place in the training data: one in each loader, joined as a CombinedLoader joins them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import forge
from forge.compat import of_lightning
from forge.integrations.lightning.loader import DrivenLoader


class Place:
    """Reads the loaders of a Trainer, and knows what it has read."""

    def __init__(self) -> None:
        self.taken = 0
        """Batches taken, over all passes and attempts."""
        self.resumables: list[Any] = []
        """The loaders of the current pass, each with its own place."""
        self._is_over: list[bool] = []
        """For each loader, whether it has ended in this pass."""
        self._saved: dict[str, Any] | None = None
        """The loaded place, until it is continued."""
        self._batches: Iterator[Any] = iter(())
        self._mode = ""
        """How the loaders of the current pass are joined."""

    def open(self, loader: DrivenLoader, epoch: int = 0) -> None:
        """Name the loaders of the coming pass, as the script has made them."""
        self._mode = loader.mode
        made = (forge.data.resumable(one, ahead=loader.ahead) for one in loader.flattened)
        self.resumables = list(made)
        for one in self.resumables:
            one.set_epoch(epoch)

    def begin_pass(self, loader: DrivenLoader, epoch: int) -> None:
        """Begin a pass: the loaders make their iterators now, as without forge."""
        self.open(loader, epoch)
        for one in self.resumables:
            one.begin_pass()
        self._is_over = [False] * len(self.resumables)
        self._batches = self._joined(loader)

    def continue_pass(self, loader: DrivenLoader) -> None:
        """Continue the pass of the loaded place; with a batch that was fetched ahead, from there.

        Raises:
            StateMismatch: If the data is joined from other loaders than at the save.
        """
        saved = self._saved
        assert saved is not None
        now = (loader.mode, len(loader.flattened))
        if now != (saved["mode"], len(saved["loaders"])):
            raise forge.StateMismatch(
                f"data: the checkpoint has a place in {len(saved['loaders'])} loaders, joined by"
                f" {saved['mode']}, but the training data has {now[1]} now, joined by {now[0]}"
            )
        self.open(loader)
        for one, state in zip(self.resumables, saved["loaders"], strict=True):
            one.load_state_dict(state)
        self._is_over = list(saved["is_over"])
        self._batches = self._joined(loader)

    def begin_loop(self) -> None:
        """The place is that of the current pass from now on, and not the loaded one."""
        self._saved = None

    def take(self) -> Any:
        """The next batch; raises StopIteration at the end of the pass."""
        batch = next(self._batches)
        self.taken += 1
        return batch

    def _joined(self, loader: DrivenLoader) -> Iterator[Any]:
        """The rest of the pass, with a batch of each loader.

        A loader that ends before the longest one begins again (`max_size_cycle`), has no batch
        (`max_size`), or ends the pass (`min_size`).
        """
        is_over, iterators = self._is_over, [iter(one) for one in self.resumables]
        while True:
            batches: list[list[Any]] = []
            for number, one in enumerate(self.resumables):
                is_closed = is_over[number] and self._mode == "max_size"
                batch = [] if is_closed else _next(iterators[number])
                if not batch:
                    is_over[number] = True
                    if self._mode == "min_size" or all(is_over):
                        self._note_ahead([[] for _ in iterators])
                        return
                    if self._mode == "max_size_cycle":
                        iterators[number] = iter(one)
                        batch = _next(iterators[number])
                batches.append(batch)
            self._note_ahead(batches)
            yield of_lightning.joined(loader, [next(iter(batch), None) for batch in batches])

    def _note_ahead(self, batches: list[list[Any]]) -> None:
        """The batch that was just taken is not trained on, if Lightning fetches ahead."""
        for one, batch in zip(self.resumables, batches, strict=True):
            one.pending = one.ahead if batch else 0

    def state_dict(self) -> dict[str, Any]:
        """The places of all loaders."""
        if self._saved is not None:
            return {**self._saved, "taken": self.taken}
        return {
            "taken": self.taken,
            "mode": self._mode,
            "is_over": list(self._is_over),
            "loaders": [one.state_dict() for one in self.resumables],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place, once the Trainer has made the loaders."""
        self.taken, self._saved = state["taken"], state


def _next(iterator: Iterator[Any]) -> list[Any]:
    """The next batch in a list, which is empty at the end."""
    for batch in iterator:
        return [batch]
    return []
