"""The time limit without a signal: do another step and a save still fit?

The signal that announces the limit can be misconfigured, or caught by the user's code. So the run
also checks the clock at each point where it can stop. If the time until the job is killed is
shorter than a step (the longest recent interval between two such points), a save and a margin
together, the run stops as on the signal. If the signal arrives earlier, the run stops on the
signal.

The end time is wall-clock time, which is what Slurm and the wrapper use. It is converted to
monotonic time once, when the run is entered: setting the clock during training must neither stop a
job nor make it miss its end. Time in which the process is suspended counts.

The end time can change (an administrator extends the limit): the wrapper writes the new time to a
file, which the run reads before it stops. The end time also makes an early signal unnecessary:
Slurm can send it up to a minute early, and the run can use that minute.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from forge import messages

END_TIME = "FORGE_END_TIME"
"""Environment variable of the job's wrapper: Unix time at which the job will be killed."""
MOVED = "end_time"
"""`<job dir>/.forge/end_time`: the new end time, if it has changed since the task began."""
SLURM_END_TIME = "SLURM_JOB_END_TIME"
"""Slurm's end time, used if the wrapper has set none. Source: sbatch(1), output environment."""

RECENT_STEPS = 100
RECENT_SAVES = 3
_MARGIN_S = (0.5, 10.0)  # callbacks, children, the interpreter's own end
_EARLY_S = (1.0, 90.0)
"""How early (seconds) the signal can be; a signal that comes earlier is not the announcement."""
_FIRST_SAVE_S = 1.0
_FIRST_SAVE_BYTES_PER_S = 200e6  # a slow network disk
_COPIES = 3  # the weights, and the two moments that Adam keeps of each


class Recent:
    """The longest of the recent durations: of the last `num` to 2 `num`."""

    def __init__(self, num: int, at_first: float = 0.0) -> None:
        self._num = num
        self._count = 0
        self._current = 0.0
        self._before = at_first

    def add(self, seconds: float) -> None:
        """Add a duration."""
        if self._count == 0:
            self._before = 0.0  # replace the estimate by a measurement
        elif self._count % self._num == 0:
            self._before, self._current = self._current, 0.0
        self._count += 1
        self._current = max(self._current, seconds)

    @property
    def longest(self) -> float:
        """Seconds; before the first measurement, the estimate."""
        return max(self._before, self._current)


def first_save_s(num_bytes: int) -> float:
    """Estimated duration of the first save, from the size of the parameters."""
    return _FIRST_SAVE_S + _COPIES * num_bytes / _FIRST_SAVE_BYTES_PER_S


class TimeLimit:
    """The time left in this attempt, and the time needed to reach the next point to stop.

    Args:
        environment: The environment with the end time.
        stop_s: The policy's timeout of a stop; the margin is a quarter of it, 0.5 s to 10 s.
        clock: Monotonic seconds.
        wall: Unix time.
        folder: The folder in which a wrapper writes a changed end time.
        num_steps: Number of steps that can follow once a stop is due, the current one included.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        stop_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        folder: Path | None = None,
        num_steps: int = 1,
    ) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._wall = wall
        self._moved = folder / MOVED if folder is not None and END_TIME in environment else None
        self._margin_s = min(max(stop_s / 4, _MARGIN_S[0]), _MARGIN_S[1])
        self._end = math.inf
        self._ways = Recent(RECENT_STEPS)
        self._since: float | None = None
        """When the run left the last point at which a stop is possible; None before any step."""
        self._is_over = False
        end = end_time_from_env(environment, messages.warn)
        if end is not None:
            left_s = end - wall()
            if left_s > 0:
                self._end = clock() + left_s
            else:
                # It must be wrong, since the job is alive; it would stop the job after each step.
                messages.warn(
                    f"The job's end time ({END_TIME} or {SLURM_END_TIME}) was {-left_s:.0f} s"
                    " before the run started: forge ignores it. Check this machine's clock."
                )
        self.is_set = self._end != math.inf
        """Whether there is an end time."""

    @property
    def left_s(self) -> float:
        """Seconds until the job is killed; infinite if there is no end time."""
        return self._end - self._clock()

    def is_near(self, save_s: float) -> bool:
        """Whether to stop at the next point; once it is True it stays True.

        Args:
            save_s: The duration of a save.
        """
        if self._is_over or self._end == math.inf:
            return self._is_over
        needed_s = self._num_steps * self._ways.longest + save_s + self._margin_s
        if self.left_s <= needed_s:
            self._end = self._clock() + moved_left_s(self._moved, self.left_s, self._wall())
            self._is_over = self.left_s <= needed_s
        return self._is_over

    def is_too_soon(self, due_s: float) -> bool:
        """Whether the announcing signal, due `due_s` before the end, would be early now."""
        return self._moved is not None and is_early(self.left_s - due_s)

    def begin_interval(self) -> None:
        """Start the interval again: the code since the last point could be interrupted."""
        self._since = self._clock()

    def end_interval(self) -> None:
        """Record a point at which the run can stop."""
        if self._since is not None and self.is_set:
            now = self._clock()
            self._ways.add(now - self._since)
            self._since = now

    def allows_step(self, save_s: float) -> bool:
        """Whether there is time for another step. The first is always allowed.

        So even a job whose limit is shorter than a step does one step in each attempt, unless it
        is killed before; the wrapper decides whether to start it again.
        """
        return self._since is None or not self.is_near(save_s)


def is_early(early_s: float) -> bool:
    """Whether a signal that arrives `early_s` before it is due is Slurm's early announcement."""
    return _EARLY_S[0] < early_s <= _EARLY_S[1]


def end_time_from_env(
    environment: Mapping[str, str], warn: Callable[[str], None] = lambda _: None
) -> float | None:
    """Unix time at which the job will be killed, from its wrapper or else from Slurm."""
    for name in (END_TIME, SLURM_END_TIME):
        text = environment.get(name, "").strip()
        try:
            end = float(text or math.nan)
        except ValueError:
            end = math.nan
        if math.isfinite(end) and end > 0:
            return end
        if text:
            warn(f"`{name}={text}` is not a Unix time in seconds: forge ignores it")
    return None


def moved_left_s(path: Path | None, left_s: float, now: float) -> float:
    """Seconds left by the file with a changed end time, if it exists; else `left_s`.

    Args:
        path: The file.
        left_s: Seconds left by the original end time.
        now: Unix time.
    """
    try:
        return float(path.read_text()) - now if path is not None else left_s
    except (OSError, ValueError):
        return left_s  # the end time has not changed


class Announcement:
    """The announcing signal of one process, if it arrives early, during the start-up.

    The start-up (imports, building the model, entering a Run) then continues, as a training loop
    does: otherwise the attempt would exit without training. The signal is ignored, and sent again
    when it is due.

    Args:
        name: The signal, without `SIG`.
        due_s: Seconds before the end of the task at which it is due.
        folder: The folder in which a wrapper writes a changed end time.
    """

    def __init__(self, name: str, due_s: float, folder: Path | None = None) -> None:
        self._number = signal.Signals[f"SIG{name}"]
        self._due_s = due_s
        self._moved = None if folder is None else folder / MOVED
        self._is_put_off = False

    def put_off(self, number: int) -> bool:
        """Whether this signal is an early announcement; if so, it is sent again when it is due."""
        if number != self._number or not is_early(self._early_s()):
            return False
        if not self._is_put_off:
            self._is_put_off = True
            threading.Thread(
                target=self._send_again, name="forge-announcement", daemon=True
            ).start()
        return True

    def _early_s(self) -> float:
        """Seconds until it is due; 0.0 if no wrapper has set the end time."""
        end = end_time_from_env(os.environ)
        if end is None or END_TIME not in os.environ:
            return 0.0
        now = time.time()
        return moved_left_s(self._moved, end - now, now) - self._due_s

    def _send_again(self) -> None:
        while (early_s := self._early_s()) > 0:  # the end time can change meanwhile
            time.sleep(early_s)
        self._is_put_off = False
        os.kill(os.getpid(), self._number)
