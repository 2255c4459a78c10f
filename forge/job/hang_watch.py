"""A supervisor's eye on its task: does it make progress, and if not, what does it stand in?

The task says in a page of memory what it is doing (`process/progress.py`), and how long that may
take; the seconds are counted here, at each tick of the supervisor, but those in which the task is
stopped, traced or asked to stop. Once its limit has passed, all ranks of the job are asked; whether
it is a hang is decided by the job's wrapper (`hangs.py`), since one rank only sees that it waits.

It never waits: what takes longer is done a little at each tick. And it never ends a task by
itself: where a file cannot be read or written, the task is not watched for a while.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from forge.filesystem.files import write_atomically
from forge.job import hang_files
from forge.job.hang_files import Answer, Phase, Question
from forge.jobdir.job_files import ATTEMPT, RANK
from forge.process import processes, stacks
from forge.process.progress import Page, Record, Section

TICK_S = 0.5
"""Of the supervisor; twice as much is the most that counts of one."""
_BUSY_TICK_S = 0.05
"""While stacks are being written."""
_LOOK, _LOOK_S, _MOVING = 0.05, 10.0, 6
"""Another rank's question is looked for after this part of the limit, and at least so often; while
steps go on so many times less often, since a thousand ranks look at the same disk."""
_AGAIN_S = 10.0
"""Until it asks again, where it could not."""


class HangWatch:
    """What a supervisor knows of its task's progress."""

    def __init__(self, forge: Path, environment: Mapping[str, str]) -> None:
        """Make the page of a task.

        Args:
            forge: The job's `.forge`.
            environment: That the task is given.
        """
        self._forge = forge
        self._rank = int(environment.get(RANK) or 0)
        self._attempt = int(environment.get(ATTEMPT) or 0)
        self._page = Page.create()
        self.environ: dict[str, str] = self._page.environ
        """What is added to the environment of the task."""
        self._record = Record()
        self._waited_s = 0.0
        self._asks_at_s = 0.0
        """Seconds without progress from which it asks again, after it was no hang."""
        self._is_stopping = False
        self._since_look_s = math.inf
        self._question: Question | None = None
        self._work: Generator[None, None, None] | None = None
        """What is being gathered."""

    @property
    def tick_s(self) -> float:
        """Seconds until the next tick, at most."""
        return TICK_S if self._work is None else _BUSY_TICK_S

    def tick(self, passed_s: float, *, is_stopping: bool) -> bool:
        """Look at the page, ask and answer.

        Args:
            passed_s: Seconds since the last tick.
            is_stopping: Whether the task was asked to stop.
        Returns:
            Whether the task is to be killed, since the job hangs.
        Raises:
            OSError: Where a question or an answer cannot be written.
        """
        self._is_stopping = is_stopping
        self._count(min(passed_s, 2 * TICK_S))
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None
            return False
        self._since_look_s += passed_s
        if self._question is not None or self._since_look_s >= self._look_s:
            self._since_look_s = 0.0
            self._take_in()
        is_due = self._is_expired and self._waited_s > self._asks_at_s
        if is_due and self._question is None:
            self._asks_at_s = self._waited_s + _AGAIN_S  # where it cannot be written
            asked = Question(attempt=self._attempt, rank=self._rank, time=time.time())
            hang_files.ask(self._forge, asked)
        return self._question is not None and self._question.phase is Phase.end

    @property
    def _look_s(self) -> float:
        """Seconds between two looks for another rank's question: few, once it may concern us."""
        often_s = min(max(_LOOK * (self._record.limit_s or math.inf), TICK_S), _LOOK_S)
        return often_s if self._waited_s >= often_s else _MOVING * often_s

    def _count(self, passed_s: float) -> None:
        record = self._page.read() or self._record  # None: torn, so look again
        if record.section is not Section.outside and not self._page.is_held():
            record = replace(record, section=Section.outside, limit_s=0.0)  # it was killed there
        if record.count != self._record.count:
            self._waited_s = self._asks_at_s = 0.0
        elif (
            record.section is not Section.outside
            and not self._is_stopping
            and not processes.is_suspended(record.pid)
        ):
            self._waited_s += passed_s
        self._record = record

    @property
    def _is_expired(self) -> bool:
        return 0 < self._record.limit_s < self._waited_s

    def _take_in(self) -> None:
        """Read the question; answer it once in each of its phases."""
        before, now = self._question, hang_files.read(self._forge, self._attempt)
        if now is None and before is not None:  # settled: asked again after twice the time
            self._asks_at_s = 2 * self._waited_s
        if now is not None and now != before:
            if now.phase is Phase.expired:
                hang_files.answer(self._forge, self._answer(now))
            elif now.phase is Phase.stacks:
                self._work = self._gather(now)
        self._question = now

    def _answer(self, question: Question) -> Answer:
        record = self._record
        return Answer(
            question=question.name,
            rank=self._rank,
            node=os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename,
            pid=record.pid,
            section=record.section.name,
            step=record.step,
            count=record.count,
            waited_s=round(self._waited_s, 1),
            limit_s=record.limit_s,
            is_expired=self._is_expired,
            excuse=self._excuse(),
        )

    def _excuse(self) -> str:
        record = self._record
        if any(map(processes.is_suspended, self._pids(record.pid))):
            return "is stopped, or in a debugger"
        if self._is_stopping:  # it has a deadline
            return "was asked to stop"
        if self._is_expired or record.section is Section.outside:
            return ""
        return f"is in `{record.section.name}` for {self._waited_s:.0f} s, within its limit"

    def _gather(self, question: Question) -> Generator[None, None, None]:
        """Write stacks and the kernel's view into the hang's folder, then answer."""
        folder, known = self._forge.parent / question.folder, self._answer(question)
        pids = self._pids(known.pid)
        found = yield from stacks.gather(self._page.fd, pids)
        said = ", ".join(f"{name}={value}" for name, value in asdict(known).items() if value != "")
        text = (
            f"{said}\nThe stacks of main threads; its output has those of all, if it was killed.\n"
        )
        for pid, python in found.items():
            python = python or "no Python stacks: it has no handler, or did not react\n"
            text += f"\n== process {pid}: {processes.command(pid)[:200]}\n{python}"
            text += f"In the kernel:\n{stacks.in_kernel(pid)}"
        frames = next(filter(None, map(stacks.main_frames, found.values())), [])
        write_atomically(folder / f"rank_{self._rank}.txt", text)
        now = self._answer(question)  # it may have moved on meanwhile
        now = replace(now, line=stacks.own_frame(frames), inside=frames[0] if frames else "")
        hang_files.answer(self._forge, now)

    def _pids(self, first: int) -> list[int]:
        """All processes of the task, the one that trains first: a worker of its may be debugged."""
        others = [pid for pid in processes.descendants() if pid != first]
        return [first, *others] if first else others
