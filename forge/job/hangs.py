"""Decides in the wrapper whether a job hangs, and reacts: the other side of `hang_files.py`.

    a rank's limit has passed ─► has any rank an excuse? ── yes ─► the job is slow: continue
                                                         └─ no ──► stacks of all ranks in hangs/<n>/
                      warn: log the hang  ◄── hang.action ──►  restart, halt: kill all tasks

A rank that is within its own limit is working, for example compiling, and the other ranks wait for
it. A rank that is stopped, traced or asked to stop has a reason to make no progress. If a rank does
not report at all, it is the culprit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from forge.config.schema import HangAction
from forge.errors import ExitCode, Reason
from forge.filesystem.files import make_directory
from forge.job import hang_files
from forge.job.ending import Ending
from forge.job.hang_files import HangQuery, HangReport, QueryPhase
from forge.job.job import Job
from forge.jobdir.job_files import OUTPUT, forge_dir, suffix, write_atomically, write_json
from forge.jobdir.job_state import State
from forge.process.progress import Phase

FOLDER = "hangs"
PATIENCE_S = {QueryPhase.report: 120.0, QueryPhase.stacks: 60.0}
"""Seconds for all ranks to report. A supervisor looks for a first query at least once a minute."""
TICK_S = 2.0
"""Seconds between two looks for reports if there is no query. It is also the most that the time
between two looks counts: the wrapper can be stopped with its whole job, whose ranks then need time
to report."""
_COLLECTIVE = Phase.collective.name
_TORCH = "/site-packages/torch/"


@dataclass(frozen=True)
class Hang:
    """A job that hangs."""

    culprit: HangReport
    """The report of the rank for which the others wait. If that rank is missing: its number, and
    the section and step of the rank that is furthest behind."""
    because: str
    """The reason why this rank is the culprit."""

    def __str__(self) -> str:
        one = self.culprit
        line = f", at {one.line}" if one.line else ""
        return (
            f"rank {one.rank} hangs: no progress in `{one.section}` at step {one.step} for"
            f" {one.waited_s:.0f} s (limit {one.limit_s:.0f} s){line} ({self.because})"
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The description, as fields for a JSON file."""
        return {**asdict(self.culprit), "because": self.because}


class Hangs:
    """Finds hangs in all attempts of a job."""

    def __init__(self, job: Job, ranks: int, action: str) -> None:
        """`ranks`: the number of ranks; `action`: the name of a `HangAction`."""
        self._job, self._forge = job, forge_dir(job.directory)
        self._ranks, self._action = ranks, HangAction[action]
        self._attempt = 0
        self._query: HangQuery | None = None
        self._waited_s = 0.0
        """Seconds since this phase of the query was sent."""
        self._looked = 0.0
        """Monotonic time of the last look."""
        self._reports: dict[int, HangReport] = {}
        """Rank -> its last report to this query, in this phase or the phase before."""
        self._ended_for: Hang | None = None
        self._has_complained = False
        """Whether an error of the hang detection was printed."""

    def begin_attempt(self, attempt: int) -> None:
        """Discard the query and the reports of earlier attempts.

        Args:
            attempt: The number of the attempt that begins.
        """
        self._attempt, self._query, self._ended_for = attempt, None, None
        with contextlib.suppress(OSError):  # a full disk: old files have another number
            hang_files.clear(self._forge)

    def look(self, gone: Mapping[int, bool]) -> None:
        """Read the reports, and act on them; called at each tick of the wrapper.

        Args:
            gone: Ranks that have ended -> whether the rank failed.
        """
        if self._action is HangAction.ignore or self._ended_for is not None:
            return
        passed_s = time.monotonic() - self._looked
        if self._query is None and passed_s < TICK_S:
            return
        self._looked += passed_s
        self._waited_s += min(passed_s, TICK_S)
        failed = [rank for rank, has_failed in gone.items() if has_failed]
        try:
            self._look(set(range(self._ranks)) - gone.keys(), failed)
        except Exception as error:  # noqa: BLE001 - an error of the detection never ends the job
            if not self._has_complained:
                self._has_complained = True
                self._job.say(
                    "hang detection failed; training continues, and forge tries again:"
                    f" {type(error).__name__}: {error}"
                )
            with contextlib.suppress(OSError):  # the same disk
                self._withdraw()

    def explain(self, ending: Ending) -> Ending:
        """The end of an attempt, with the hang as its reason if a hang ended it."""
        hang = self._ended_for
        if hang is None or ending.is_finished or ending.is_imposed:
            return ending
        code = int(ExitCode.FORCED)
        return Ending(Reason.hung, code, str(hang), hung_at=hang.culprit.step)

    def _look(self, live: set[int], failed: list[int]) -> None:
        query = self._query or self._begin_query(live)
        if query is None:
            return
        behind = live - {one.rank for one in self._reports.values() if one.query == query.name}
        new = hang_files.read_reports(self._forge, self._attempt, behind, query)
        excuse = self._excuse(new, failed)
        self._reports |= {one.rank: one for one in new}
        reports = {rank: self._reports[rank] for rank in sorted(live & self._reports.keys())}
        if not excuse:
            if len(new) < len(behind) and self._waited_s < PATIENCE_S[query.phase]:
                return
            if not any(one.is_expired for one in reports.values()):
                excuse = "no rank is past its limit any more"  # that rank has left its Run by now
        if excuse:
            self._job.record("no hang", rank=query.rank, because=excuse)
            if query.folder:
                shutil.rmtree(self._job.directory / query.folder, ignore_errors=True)
            self._withdraw()
        elif query.phase is QueryPhase.report:
            self._ask(replace(query, phase=QueryPhase.stacks, folder=self._make_folder()))
        else:
            self._act(query, reports, live)

    def _begin_query(self, live: set[int]) -> HangQuery | None:
        """Query all ranks if a rank has reported that its limit has passed."""
        expired = hang_files.read_reports(self._forge, self._attempt, live)
        if not expired:
            return None
        self._reports = {}
        first = max(expired, key=lambda one: one.waited_s)
        return self._ask(HangQuery(attempt=self._attempt, rank=first.rank, time=time.time()))

    def _ask(self, query: HangQuery) -> HangQuery:
        hang_files.write_query(self._forge, query)
        self._query, self._waited_s = query, 0.0
        return query

    def _withdraw(self) -> None:
        self._query = None
        hang_files.clear(self._forge)

    def _excuse(self, new: list[HangReport], failed: list[int]) -> str:
        """The reason why the job does not hang, after a rank's limit; empty if it hangs."""
        if failed:
            return f"rank {failed[0]} has failed: the other ranks are given time to save and exit"
        for one in new:
            if one.excuse:
                return f"rank {one.rank} {one.excuse}"
            if one.count != self._reports.get(one.rank, one).count:
                return f"rank {one.rank} has made progress since"
        return ""

    def _make_folder(self) -> str:
        """The next of `hangs/<n>`, relative to the job's directory."""
        above = self._job.directory / FOLDER
        make_directory(above)
        numbers = [int(name) for name in os.listdir(above) if name.isdecimal()]
        name = f"{FOLDER}/{1 + max(numbers, default=0)}"
        (self._job.directory / name).mkdir()
        return name

    def _act(self, query: HangQuery, reports: dict[int, HangReport], live: set[int]) -> None:
        hang = find_culprit(query, reports, live)
        then = "left alone" if self._action is HangAction.warn else "ended"
        then = f"the job is {then} (`resilience.hang.action={self._action.name}`)"
        text = f"{hang}; {then}; stacks, and what to do, are in {query.folder}/summary.txt"
        self._job.say(text)
        self._job.record("hang", **hang.fields, action=self._action.name, folder=query.folder)
        with contextlib.suppress(OSError):  # a full disk: the message has the main points
            folder = self._job.directory / query.folder
            ranks = {str(rank): asdict(one) for rank, one in reports.items()}
            write_json(folder / "summary.json", hang.fields | {"ranks": ranks})
            write_atomically(folder / "summary.txt", _summary(hang, reports, live))
        if self._action is HangAction.warn:
            if self._job.state.state is State.running:  # the launcher shows it
                self._job.write(State.running, self._job.state.because, hang=text)
            self._withdraw()
        else:
            self._ask(replace(query, phase=QueryPhase.end))
            self._ended_for = hang


def find_culprit(query: HangQuery, reports: dict[int, HangReport], live: set[int]) -> Hang:
    """Find the rank for which the others wait.

    Args:
        query: Names the rank whose limit passed first: the culprit if nothing else distinguishes
            the ranks.
        reports: Rank -> its report.
        live: All ranks that have not ended.
    """
    left, because = list(reports.values()), "it is the only rank"
    if len(left) > 1:
        because = "nothing distinguishes it from the other ranks; its limit passed first"
    for narrow, why in (
        (_fewest_steps, "it has done the fewest steps"),
        (_not_in_collective, "the other ranks wait in a collective"),
        (_at_another_line, "it is at another line than most ranks"),
        (
            _outside_torch,
            "its innermost frame is outside torch, and the other ranks wait inside torch",
        ),
    ):
        fewer = narrow(left)
        if len(fewer) < len(left):
            left, because = fewer, why
    culprit = next((one for one in left if one.rank == query.rank), left[0])
    if not culprit.limit_s:  # it is outside its Run
        culprit = replace(culprit, limit_s=max(one.limit_s for one in reports.values()))
    if missing := sorted(live - reports.keys()):
        culprit = replace(culprit, rank=missing[0], node="", pid=0, line="", inside="")
        because = "its supervisor does not report: is its node down?"
    return Hang(culprit, because)


def _fewest_steps(left: list[HangReport]) -> list[HangReport]:
    fewest = min(one.step for one in left)
    return [one for one in left if one.step == fewest]


def _not_in_collective(left: list[HangReport]) -> list[HangReport]:
    return [one for one in left if one.section != _COLLECTIVE] or left


def _at_another_line(left: list[HangReport]) -> list[HangReport]:
    """The ranks that are not at the line at which most ranks are."""
    frames = Counter((one.line, one.inside) for one in left)
    (most, number), *others = frames.most_common()
    if not others or others[0][1] == number:
        return left
    return [one for one in left if (one.line, one.inside) != most]


def _outside_torch(left: list[HangReport]) -> list[HangReport]:
    """Two ranks have no most common line; a rank waits for a collective inside torch."""
    return [one for one in left if _TORCH not in one.inside] or left


_ADVICE = """
If the job was slow and did not hang: raise `resilience.hang.timeout_s`. For the
start-up, the first steps, saves and evaluations, and compilations, raise
`resilience.hang.start_s`. In a long evaluation, call `run.check_stop()` for
each batch, since each call counts as progress."""


def _summary(hang: Hang, reports: dict[int, HangReport], live: set[int]) -> str:
    log = f"{OUTPUT}{suffix(hang.culprit.rank)}"
    lines = [f"{hang}", f"The output of this rank is in {log}.", _ADVICE, ""]
    for rank in sorted(live):
        one = reports.get(rank)
        if one is None:
            lines.append(f"rank {rank}: no report")
            continue
        where = f"`{one.section}` at step {one.step} for {one.waited_s:.0f} s"
        lines.append(f"rank {rank} on {one.node}, process {one.pid}: {where}")
        lines += [f"    {frame}" for frame in dict.fromkeys((one.line, one.inside)) if frame]
    return "\n".join(lines) + "\n"
