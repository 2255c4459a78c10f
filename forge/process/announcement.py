"""The signal that announces the time limit, if it arrives early, during the start-up.

Slurm can send it up to a minute early. A training loop then continues (see `time_limit`), and so
does the start-up (imports, building the model, entering a Run): otherwise the attempt would exit
without training. The signal is ignored, and sent again when it is due.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from forge.process import time_limit


class Announcement:
    """The announcing signal of one process.

    Args:
        name: The signal, without `SIG`.
        due_s: Seconds before the end of the task at which it is due.
        folder: The folder in which a wrapper writes a changed end time.
    """

    def __init__(self, name: str, due_s: float, folder: Path | None = None) -> None:
        self._number = signal.Signals[f"SIG{name}"]
        self._due_s = due_s
        self._moved = None if folder is None else folder / time_limit.MOVED
        self._is_put_off = False

    def put_off(self, number: int) -> bool:
        """Whether this signal is an early announcement; if so, it is sent again when it is due."""
        if number != self._number or not time_limit.is_early(self._early_s()):
            return False
        if not self._is_put_off:
            self._is_put_off = True
            threading.Thread(
                target=self._send_again, name="forge-announcement", daemon=True
            ).start()
        return True

    def _early_s(self) -> float:
        """Seconds until it is due; 0.0 if no wrapper has set the end time."""
        end = time_limit.end_time_from_env(os.environ)
        if end is None or time_limit.END_TIME not in os.environ:
            return 0.0
        now = time.time()
        return time_limit.moved_left_s(self._moved, end - now, now) - self._due_s

    def _send_again(self) -> None:
        while (early_s := self._early_s()) > 0:  # the end time can change meanwhile
            time.sleep(early_s)
        self._is_put_off = False
        os.kill(os.getpid(), self._number)
