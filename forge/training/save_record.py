"""The events of saves in the ledger, with the time for which training waited for each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint.save.staging import Snapshot
from forge.jobdir.ledger import Ledger
from forge.training.interval import NUM_SAVES


@dataclass
class Pause:
    """Training waits for a save."""

    began: float
    """Unix time."""
    waited_s: float | None = None
    """None: training still waits."""

    def end(self) -> None:
        """Training continues, if it had not before."""
        if self.waited_s is None:
            self.waited_s = time.time() - self.began


class SaveRecord:
    """Writes `saving` and `save` to the ledger.

    Args:
        ledger: The ledger of the Run.
        summary: Returns the metrics so far, by name; each `save` has them.
    """

    def __init__(self, ledger: Ledger, summary: Callable[[], dict[str, Any]]) -> None:
        self._ledger, self._summary = ledger, summary
        self._waits = deque[float](maxlen=NUM_SAVES)
        """Seconds for which the last saves have stopped training."""

    def begin(self, step: int) -> Pause:
        """Training stops for a save; an attempt that ends before `save` has ended in it."""
        self._ledger.write("saving", step=step)
        return Pause(time.time())

    def end(
        self, snapshot: Snapshot, path: Path, reason: str, seconds: float, pause: Pause
    ) -> None:
        """A checkpoint is committed.

        Args:
            snapshot: Its state.
            path: Its directory.
            reason: The name of a `SaveCause`.
            seconds: Time for writing it.
            pause: The time for which training waited; it ends now at the latest.
        """
        pause.end()
        waited_s = pause.waited_s or 0.0
        self._waits.append(waited_s)
        self._ledger.write(
            "save",
            step=snapshot.step,
            reason=reason,
            path=path.name,
            bytes=snapshot.num_bytes,
            seconds=round(seconds, 4),
            began=round(pause.began, 3),
            waited=round(waited_s, 4),
            waits=[round(one, 4) for one in self._waits],
            summary=self._summary(),
        )
