"""The files with which a job's supervisors and its wrapper determine whether the job hangs.

<job dir>/.forge/hang/rank<r>   report of rank r's supervisor on the progress of its task
<job dir>/.forge/hang/query     the wrapper's current request to all supervisors

A supervisor whose limit has passed writes its report without a query. The wrapper looks for such a
report, and then sends its query in up to three phases:

    report   all supervisors report
    stacks   the job hangs: all supervisors collect the stacks of their tasks, and report again
    end      all supervisors kill their tasks

The wrapper withdraws the query by emptying the folder. Each file has one writer, which replaces it
atomically. Readers reopen the folder each time, so that a network file system shows new files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from forge.filesystem.files import make_directory
from forge.filesystem.preallocated_file import write_padded
from forge.jobdir.job_files import HANG, read_json, write_json

_QUERY, _RANK = "query", "rank"


class QueryPhase(Enum):
    """The task that a query gives to the supervisors."""

    report = "report"
    stacks = "stacks"
    end = "end"


@dataclass(frozen=True, kw_only=True)
class HangQuery:
    """A request of the wrapper to all supervisors."""

    attempt: int
    """Number of the job's attempt: files of earlier attempts are ignored."""
    rank: int
    """The rank whose limit passed first."""
    time: float
    """Unix time, to tell queries of one attempt apart."""
    phase: QueryPhase = QueryPhase.report
    folder: str = ""
    """Folder of the stacks, relative to the job's directory; empty in the phase `report`."""

    @property
    def name(self) -> str:
        """A name that no other query has, and no other phase of this query."""
        return f"{self.time}-{self.phase.name}"


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """The progress of a rank's task, as its supervisor sees it."""

    attempt: int
    query: str
    """Name of the query that this report answers; empty without a query: the limit has passed."""
    rank: int
    node: str
    pid: int
    """The process of the task that trains; 0: no process has entered a Run."""
    section: str
    step: int
    count: int
    """Grows with each progress."""
    waited_s: float
    """Seconds without progress; seconds in which the task was stopped or traced do not count."""
    limit_s: float
    """Limit of the section; 0: no limit."""
    is_expired: bool
    excuse: str
    """The reason why this rank does not hang; empty if it possibly hangs."""
    line: str = ""
    """The line of the user's code that the main thread executes; in the phase `stacks`."""
    inside: str = ""
    """The innermost frame of the main thread."""


def write_report(forge: Path, report: HangReport) -> None:
    """Replace the report of a rank. Raises OSError if it cannot be written."""
    write_json(forge / HANG / f"{_RANK}{report.rank}", asdict(report))


def read_reports(
    forge: Path, attempt: int, ranks: Container[int], query: HangQuery | None = None
) -> list[HangReport]:
    """The reports of some ranks in this attempt.

    Args:
        forge: The job's `.forge`.
        attempt: Number of the attempt.
        ranks: The ranks whose reports are read.
        query: The query that they answer; None: reports without a query.
    Raises:
        TypeError, LookupError: If another version of forge wrote a report.
        Untrusted: If another user can write a report.
    """
    reports = []
    for name in os.listdir(forge / HANG):
        number = name.removeprefix(_RANK)
        if not number.isdecimal() or int(number) not in ranks:
            continue
        content = read_json(forge / HANG / name)
        if content is not None and content["attempt"] == attempt:
            reports.append(HangReport(**content))
    wanted = "" if query is None else query.name
    return [one for one in reports if one.query == wanted]


def write_query(forge: Path, query: HangQuery) -> None:
    """Send a query, or the next phase of the present query.

    Raises:
        OSError: If it cannot be written. On a full disk, the phase `end` still can: its text is no
            longer than the text that it overwrites.
    """
    text = json.dumps(asdict(query) | {"phase": query.phase.name})
    write_padded(forge / HANG / _QUERY, text, 0)


def read_query(forge: Path, attempt: int) -> HangQuery | None:
    """The query of this attempt; None if there is none. Raises as `read_reports` does."""
    content = read_json(forge / HANG / _QUERY)
    if content is None or content["attempt"] != attempt:
        return None
    return HangQuery(**{**content, "phase": QueryPhase[content["phase"]]})


def clear(forge: Path) -> None:
    """Make the folder, or empty it: the query is withdrawn, and old reports are removed."""
    make_directory(forge / HANG)
    for name in os.listdir(forge / HANG):
        (forge / HANG / name).unlink(missing_ok=True)
