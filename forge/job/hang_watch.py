"""How a supervisor detects that its task makes no progress, and reports it to the wrapper.

The task writes its section, and the time limit of that section, into a page of memory
(`process/progress.py`). The supervisor counts the seconds at each tick, except seconds in which the
task is stopped, traced or asked to stop. Once the limit has passed, the supervisor reports it. The
job's wrapper decides whether it is a hang (`hangs.py`), since a rank knows only its own wait.

A tick never waits: longer work is done in small parts, one part a tick. If a file cannot be read or
written, hang detection pauses, and the task continues.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from forge.filesystem.files import write_atomically
from forge.job import hang_files
from forge.job.hang_files import HangQuery, HangReport, QueryPhase
from forge.jobdir.job_files import ATTEMPT, RANK
from forge.process import processes, stacks
from forge.process.progress import HeartbeatPage, HeartbeatRecord, Phase

TICK_S = 0.5
"""Seconds between two ticks of the supervisor; a tick never counts for more than twice as much."""
BUSY_TICK_S = 0.05
"""Seconds between two ticks while stacks are written."""
_LOOK, _LOOK_S, _MOVING = 0.05, 10.0, 6
"""A supervisor checks for a query after this part of its limit, and at least every `_LOOK_S`
seconds; while the task makes progress, `_MOVING` times less often, since a thousand supervisors
read from the same disk."""
_AGAIN_S = 10.0
"""Seconds until an expired limit is reported again if no query follows."""


class HangWatch:
    """Watches the progress of one task for its supervisor."""

    def __init__(self, forge: Path, environment: Mapping[str, str]) -> None:
        """Make the page of a task.

        Args:
            forge: The job's `.forge`.
            environment: The environment of the task.
        """
        self._forge = forge
        self._rank = int(environment.get(RANK) or 0)
        self._attempt = int(environment.get(ATTEMPT) or 0)
        self.page = HeartbeatPage.create()
        self.environ: dict[str, str] = self.page.environ
        """Variables to add to the environment of the task."""
        self._record = HeartbeatRecord()
        self.waited_s = 0.0
        """Seconds without progress."""
        self._reports_at_s = 0.0
        """Seconds without progress after which an expired limit is reported."""
        self._is_stopping = False
        self._since_look_s = math.inf
        self._query: HangQuery | None = None
        self._gathering: Generator[None, None, None] | None = None
        """Collects stacks, one part a tick."""

    @property
    def section(self) -> str:
        """The section of the task's last heartbeat; empty before the first."""
        record = self.page.read() or self._record
        return record.section.name if record.pid else ""

    @property
    def tick_s(self) -> float:
        """Seconds until the next tick, at most."""
        return TICK_S if self._gathering is None else BUSY_TICK_S

    def tick(self, passed_s: float, *, is_stopping: bool) -> bool:
        """Read the page, report an expired limit, and follow the wrapper's query.

        Args:
            passed_s: Seconds since the last tick.
            is_stopping: Whether the task was asked to stop.
        Returns:
            Whether to kill the task, because the job hangs.
        Raises:
            OSError: If a report cannot be written.
        """
        self._is_stopping = is_stopping
        self._count(min(passed_s, 2 * TICK_S))
        if self._gathering is not None:
            try:
                next(self._gathering)
            except StopIteration:
                self._gathering = None
            return False
        self._since_look_s += passed_s
        if self._query is not None or self._since_look_s >= self._look_s:
            self._since_look_s = 0.0
            self._follow_query()
        if self._query is None and self._is_expired and self.waited_s > self._reports_at_s:
            self._reports_at_s = self.waited_s + _AGAIN_S
            hang_files.write_report(self._forge, self._report())
        return self._query is not None and self._query.phase is QueryPhase.end

    @property
    def _look_s(self) -> float:
        """Seconds between two checks for a query: few if this rank makes no progress either."""
        often_s = min(max(_LOOK * (self._record.limit_s or math.inf), TICK_S), _LOOK_S)
        return often_s if self.waited_s >= often_s else _MOVING * often_s

    def _count(self, passed_s: float) -> None:
        record = self.page.read() or self._record  # None: being written, so read it next time
        if record.section is not Phase.outside and not self.page.is_held():
            # The process that trained was killed.
            record = replace(record, section=Phase.outside, limit_s=0.0)
        if record.count != self._record.count:
            self.waited_s = self._reports_at_s = 0.0
        elif (
            record.section is not Phase.outside
            and not self._is_stopping
            and not processes.is_suspended(record.pid)
        ):
            self.waited_s += passed_s
        self._record = record

    @property
    def _is_expired(self) -> bool:
        return 0 < self._record.limit_s < self.waited_s

    def _follow_query(self) -> None:
        """Read the query, and act once on each of its phases."""
        before = self._query
        query = self._query = hang_files.read_query(self._forge, self._attempt)
        if query is None and before is not None:  # no hang: report again after twice the time
            self._reports_at_s = 2 * self.waited_s
        if query is None or query == before:
            return
        if query.phase is QueryPhase.report:
            hang_files.write_report(self._forge, self._report(query))
        elif query.phase is QueryPhase.stacks:
            self._gathering = self._gather(query)

    def _report(self, query: HangQuery | None = None, frames: Sequence[str] = ()) -> HangReport:
        record = self._record
        return HangReport(
            attempt=self._attempt,
            query="" if query is None else query.name,
            rank=self._rank,
            node=os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename,
            pid=record.pid,
            section=record.section.name,
            step=record.step,
            count=record.count,
            waited_s=round(self.waited_s, 1),
            limit_s=record.limit_s,
            is_expired=self._is_expired,
            excuse=self._excuse(),
            line=stacks.own_frame(frames),
            inside=frames[0] if frames else "",
        )

    def _excuse(self) -> str:
        record = self._record
        if any(map(processes.is_suspended, self._pids(record.pid))):
            return "is stopped, or in a debugger"
        if self._is_stopping:  # it has a deadline
            return "was asked to stop"
        if self._is_expired or record.section is Phase.outside:
            return ""
        return f"has been in `{record.section.name}` for {self.waited_s:.0f} s, within its limit"

    def _gather(self, query: HangQuery) -> Generator[None, None, None]:
        """Write the stacks and the kernel's view into the hang's folder, then report."""
        report = self._report(query)
        pids = self._pids(report.pid)
        found = yield from stacks.gather(self.page.fd, pids)
        head = ", ".join(f"{name}={value}" for name, value in asdict(report).items() if value != "")
        text = (
            f"{head}\nStacks of the main threads; if the job was killed, the output of this rank"
            " shows the stacks of all threads.\n"
        )
        for pid, python in found.items():
            python = python or "no Python stacks: the process did not answer in time\n"
            text += f"\n== process {pid}: {processes.command(pid)[:200]}\n{python}"
            text += f"In the kernel:\n{stacks.in_kernel(pid)}"
        folder = self._forge.parent / query.folder
        write_atomically(folder / f"rank_{self._rank}.txt", text)
        frames = next(filter(None, map(stacks.main_frames, found.values())), [])
        # A new report, since the task can have made progress meanwhile.
        hang_files.write_report(self._forge, self._report(query, frames))

    def _pids(self, first: int) -> list[int]:
        """All processes of the task, the process that trains first. A debugger can be attached to
        any of them, such as a DataLoader worker."""
        others = [pid for pid in processes.descendants() if pid != first]
        return [first, *others] if first else others
