"""The time limit without any signal: whether another step, and a save after it, still fit.

The signal that announces the limit may be misconfigured, or swallowed by the user's code. So the
run also looks for itself, wherever it could stop: what is left until the job is killed has to hold
the longest way from one such place to the next (a step), a save, and a margin. Where it does not,
the run stops as the signal would have stopped it. A signal that does come is earlier, as long as
its lead is longer than all that.

The end is a time of the wall clock, since only that is shared with whoever kills the job. It is
read against the wall clock once, as the run is entered, and from then on the monotonic clock
counts: a clock that is set while training must neither stop a job nor make it miss its end.

Time in which the process is suspended counts, for the limit as for the step that it falls into.

A wrapper may learn of another end (an administrator extends the limit): it writes
that down, and the run reads it before it stops. And it makes an early announcement superfluous:
Slurm's comes up to a minute before its time, of which a run can make use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from forge import messages
from forge.jobdir.plan import JobPlan

END_TIME = "FORGE_END_TIME"
"""Environment variable of the job's wrapper: Unix time at which the job will be killed."""
MOVED = "end_time"
"""`<job dir>/.forge/end_time`: the end as it is now, where it was moved since the task began."""
SLURM_END_TIME = "SLURM_JOB_END_TIME"
"""The same from Slurm, where no wrapper says better. Source: sbatch(1), output environment."""

RECENT_STEPS = 100
RECENT_SAVES = 3
_MARGIN_S = (0.5, 10.0)  # callbacks, children, the interpreter's own end
_EARLY_S = (1.0, 90.0)
"""An announcement may come so much before its time; one that is earlier is no announcement."""
_FIRST_SAVE_S = 1.0
_FIRST_SAVE_BYTES_PER_S = 200e6  # a slow network disk
_COPIES = 3  # the weights, and the two moments that Adam keeps of each


class Recent:
    """The longest of the last few durations: of `num` at least, and of twice as many at most."""

    def __init__(self, num: int, at_first: float = 0.0) -> None:
        self._num = num
        self._count = 0
        self._current = 0.0
        self._before = at_first

    def add(self, seconds: float) -> None:
        """Another one."""
        if self._count == 0:
            self._before = 0.0  # measured is better than estimated
        elif self._count % self._num == 0:
            self._before, self._current = self._current, 0.0
        self._count += 1
        self._current = max(self._current, seconds)

    @property
    def longest(self) -> float:
        """Seconds; before the first, what was estimated."""
        return max(self._before, self._current)


def first_save_s(num_bytes: int) -> float:
    """What a save may take, before one was measured, with so many bytes of parameters."""
    return _FIRST_SAVE_S + _COPIES * num_bytes / _FIRST_SAVE_BYTES_PER_S


class TimeLimit:
    """What is left of this attempt, and what it takes to get to the next place to stop.

    Args:
        environment: Holds the end time.
        stop_s: What the policy gives to a stop; the margin is a quarter of it, 0.5 s to 10 s.
        clock: Monotonic seconds.
        wall: Unix time.
        folder: Where a wrapper writes down that the end was moved.
        num_steps: Steps that may follow once a stop is due, the one under way among them.
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
        """When the last place to stop was left; None before the first step."""
        self._is_over = False
        end = end_time_from_env(environment, messages.warn)
        if end is not None:
            left_s = end - wall()
            if left_s > 0:
                self._end = clock() + left_s
            else:
                # Whoever is alive after it was given a wrong one, and would stop after every step.
                messages.warn(
                    f"The job's end time is {-left_s:.0f} s in the past when the run starts: it"
                    f" is ignored ({END_TIME}, {SLURM_END_TIME}; is the clock right?)"
                )

    @property
    def left_s(self) -> float:
        """Seconds until the job is killed; infinite where nobody said."""
        return self._end - self._clock()

    def is_near(self, save_s: float) -> bool:
        """Whether to stop at the next occasion; once it is so it stays so.

        Args:
            save_s: What a save takes.
        """
        needed_s = self._num_steps * self._ways.longest + save_s + self._margin_s
        if not self._is_over and self.left_s <= needed_s:
            self._end = self._clock() + moved_left_s(self._moved, self.left_s, self._wall())
            self._is_over = self.left_s <= needed_s
        return self._is_over

    def is_too_soon(self, due_s: float) -> bool:
        """Whether the limit's announcement, due so many seconds before the end, is early now."""
        return self._moved is not None and is_early(self.left_s - due_s)

    def leave(self) -> None:
        """What was done since the last place to stop was no way to the next: it could be left."""
        self._since = self._clock()

    def arrive(self) -> None:
        """Here the run could stop."""
        now = self._clock()
        if self._since is not None:
            self._ways.add(now - self._since)
            self._since = now

    def allows_step(self, save_s: float) -> bool:
        """Whether another step may begin here; it begins now. The first always may.

        A job whose limit is shorter than one step still makes progress by a step in each attempt,
        if it is not killed before; whether that is worth another start the wrapper decides.
        """
        is_first = self._since is None
        self._since = self._clock()
        return is_first or not self.is_near(save_s)


def is_early(early_s: float) -> bool:
    """Whether an announcement that comes so many seconds before it is due is Slurm's, and early."""
    return _EARLY_S[0] < early_s <= _EARLY_S[1]


def end_time_from_env(
    environment: Mapping[str, str], warn: Callable[[str], None] = lambda _: None
) -> float | None:
    """Unix time at which the job will be killed, by its wrapper's word or else by Slurm's."""
    for name in (END_TIME, SLURM_END_TIME):
        text = environment.get(name, "").strip()
        try:
            end = float(text or math.nan)
        except ValueError:
            end = math.nan
        if math.isfinite(end) and end > 0:
            return end
        if text:
            warn(f"`{name}={text}` is not a Unix time in seconds: it is ignored")
    return None


def moved_left_s(path: Path | None, left_s: float, now: float) -> float:
    """Seconds left where the end was moved, by the file that says so; else `left_s`.

    Args:
        path: That file.
        left_s: What is left as far as is known.
        now: Unix time.
    """
    try:
        return float(path.read_text()) - now if path is not None else left_s
    except (OSError, ValueError):
        return left_s  # it was not moved


def env_for_child(
    left_s: float | None, plan: JobPlan, environment: Mapping[str, str]
) -> dict[str, str]:
    """What a wrapper adds to the environment of a task that it is about to start.

    A task that swallows the signal of the limit does not live until the limit: its supervisor takes
    it for hanging, and kills it `shutdown.timeout_s` after that signal. So its end is then. A job
    inside another one ends with that, if it is earlier.

    Args:
        left_s: Seconds that the task may take; None: no limit of its own.
        plan: The job's.
        environment: The task's, as far as it stands.
    """
    if left_s is None:
        return {}
    stops = plan.actions.get(plan.signal) in ("stop", "requeue")
    if stops and plan.timeout_s > 0:
        left_s -= max(plan.warning_s - plan.timeout_s, 0.0)
    end = min(time.time() + left_s, end_time_from_env(environment) or math.inf)
    return {END_TIME: f"{end:.3f}"}
