"""What the supervisors and the wrapper of a job ask each other when a rank makes no progress.

<job dir>/.forge/hang.json              the question, of the first rank whose limit has passed
<job dir>/.forge/hang.json.answer<rank>  what each rank's supervisor answers

    expired   a supervisor's limit has passed; all the others say how their tasks are
    stacks    by the wrapper: it is a hang; all gather the stacks of their tasks
    end       by the wrapper: all kill their tasks

The wrapper removes it again where it was no hang, or was only to be logged.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

from forge.filesystem.files import open_file, write_all, write_atomically
from forge.job.padded import write_padded
from forge.jobdir.job_files import HANG, read_json, suffix, write_json


class Phase(Enum):
    """How far a question has come."""

    expired = "expired"
    stacks = "stacks"
    end = "end"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What lies in `hang.json`."""

    attempt: int
    """Of the job: a file of an earlier one says nothing."""
    rank: int
    """Who asks."""
    time: float
    """When."""
    phase: Phase = Phase.expired
    folder: str = ""
    """Where the stacks go, once it is a hang; in the job's directory."""

    @property
    def name(self) -> str:
        """No other question has it, and none of its other phases."""
        return f"{self.attempt}-{self.rank}-{self.time}-{self.phase.name}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How the task of a rank is."""

    question: str
    """Its name."""
    rank: int
    node: str
    pid: int
    """Which of its processes trains; 0: none has entered a Run."""
    section: str
    step: int
    count: int
    """Grows with every progress."""
    waited_s: float
    """Seconds without progress; those in which it was stopped or traced do not count."""
    limit_s: float
    """Of its section; 0 where there is none."""
    is_expired: bool
    excuse: str
    """Why it is no hang, as far as this rank knows; empty: it may be one."""
    line: str = ""
    """The line of the user's code that its main thread stands in; of the phase `stacks`."""
    inside: str = ""
    """The innermost frame."""


def ask(forge: Path, question: Question) -> None:
    """Ask it, unless somebody has asked already. Raises OSError where it cannot be written."""
    try:
        fd = open_file(forge / HANG, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    try:
        write_all(fd, _text(question).encode())
    except OSError:  # a full disk: half a question would never be answered
        withdraw(forge)
        raise
    finally:
        os.close(fd)


def ask_for_stacks(forge: Path, question: Question, folder: str) -> Question:
    """The wrapper's: it is a hang. Raises OSError where nobody could answer: on a full disk."""
    moved = replace(question, phase=Phase.stacks, folder=folder)
    write_atomically(forge / HANG, _text(moved))
    return moved


def end(forge: Path, question: Question) -> None:
    """The wrapper's: all kill their tasks. Raises OSError where this cannot be written."""
    # No longer than what is there: even a full disk has room for it.
    write_padded(forge / HANG, _text(replace(question, phase=Phase.end)), 0)


def withdraw(forge: Path) -> None:
    """There is nothing to answer any more."""
    (forge / HANG).unlink(missing_ok=True)


def read(forge: Path, attempt: int) -> Question | None:
    """The question of this attempt; None where there is none, or only half of one.

    Raises:
        TypeError, LookupError: Where another forge has written it. So does `answer_of`.
        Untrusted: Where somebody else could have.
    """
    # Opening the directory has a network file system ask for its names again.
    with contextlib.suppress(OSError):
        os.close(os.open(forge, os.O_RDONLY))
    content = read_json(forge / HANG)
    if content is None or content["attempt"] != attempt:
        return None
    return Question(**{**content, "phase": Phase[content["phase"]]})


def answer(forge: Path, given: Answer) -> None:
    """Answer for a rank. Raises OSError where it cannot be written."""
    write_json(_answer(forge, given.rank), asdict(given))


def answer_of(forge: Path, rank: int, question: Question) -> Answer | None:
    """What a rank has answered to this question in this phase; None: nothing so far."""
    content = read_json(_answer(forge, rank))
    if content is None or content["question"] != question.name:
        return None
    return Answer(**content)


def _answer(forge: Path, rank: int) -> Path:
    return forge / f"{HANG}.answer{suffix(rank)}"


def _text(question: Question) -> str:
    return json.dumps(asdict(question) | {"phase": question.phase.name})
