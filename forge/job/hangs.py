"""Whether a job hangs, and what becomes of it: the wrapper's side of `hang_files.py`.

    a limit has passed ─► do all ranks say so? ── no ─► it is only slow: nothing happened
                                              └─ yes ─► stacks of all ranks, into hangs/<n>/
                          warn: it is logged  ◄── hang.action ──►  restart, halt: all are killed

A rank that is within its own limit is working, and the others wait for it: a compilation, say. One
that is stopped, traced or asked to stop makes no progress for a reason. Where one does not answer
at all, it is the one that is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forge.config.schema import HangAction
from forge.errors import ExitCode, Reason
from forge.filesystem.files import make_directory
from forge.job import hang_files
from forge.job.hang_files import Answer, Phase, Question
from forge.job.requeue import Outcome
from forge.jobdir.job_files import HANG, OUTPUT, forge_dir, suffix, write_atomically, write_json
from forge.process.progress import Section

FOLDER = "hangs"
_ANSWER_S = 120.0
"""Seconds for all ranks to say how they are: they look for a question every minute."""
_STACKS_S = 60.0
"""Seconds for all ranks to gather their stacks."""
_TICK_S = 2.0
"""Between two looks while nobody asks; and the most that counts of what lies between two, since the
wrapper may be stopped with its whole job, which then has to answer first."""
_WAITS = Section.collective.name
_TORCH = "/site-packages/torch/"


@dataclass(frozen=True)
class Hang:
    """What is known of one."""

    who: Answer
    """Of the rank that holds up the others; a missing one has the place of the one behind."""
    because: str
    """Why it is this one."""

    def __str__(self) -> str:
        who = self.who
        at = f", at {who.line}" if who.line else ""
        where = f"no progress in `{who.section}` at step {who.step} for {who.waited_s:.0f} s"
        where += f", where {who.limit_s:.0f} s are allowed"
        return f"rank {who.rank} hangs: {where}{at} ({self.because})"

    @property
    def fields(self) -> dict[str, Any]:
        """The same for a file."""
        return {**asdict(self.who), "because": self.because}


class Hangs:
    """The wrapper's knowledge of hangs, over all attempts of a job."""

    def __init__(
        self,
        directory: Path,
        ranks: int,
        action: str,
        record: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        """Begin with none.

        Args:
            directory: The job's.
            ranks: How many there are.
            action: The name of a `HangAction`.
            record: Writes a line of the job's ledger.
            say: Writes into the job's output.
        """
        self._directory, self._forge = directory, forge_dir(directory)
        self._ranks, self._action = ranks, HangAction[action]
        self._record, self._say = record, say
        self._attempt = 0
        self._asked: Question | None = None
        self._waited_s = 0.0
        """Since its phase was first seen."""
        self._looked = 0.0
        self._answers: dict[int, Answer] = {}
        """Of this phase."""
        self._before: dict[int, Answer] = {}
        """Of the one before."""
        self._ended_for: Hang | None = None
        self._is_blind = False
        """Whether it was said that this cannot be looked at."""

    def begin(self, attempt: int) -> None:
        """Nothing of an earlier attempt counts any more.

        Args:
            attempt: The number of the one that begins.
        """
        self._attempt, self._asked, self._ended_for = attempt, None, None
        for path in self._forge.glob(f"{HANG}*"):
            path.unlink(missing_ok=True)

    def look(self, gone: Mapping[int, bool]) -> None:
        """At each tick of the wrapper: take a question one phase further.

        Args:
            gone: Ranks that have ended, and whether that was a failure.
        """
        if self._action is HangAction.ignore or self._ended_for is not None:
            return
        passed_s = time.monotonic() - self._looked
        if self._asked is None and passed_s < _TICK_S:
            return
        self._looked += passed_s
        self._waited_s += min(passed_s, _TICK_S)
        failed = [rank for rank, has_failed in gone.items() if has_failed]
        try:
            self._look(set(range(self._ranks)) - gone.keys(), failed)
        except Exception as error:  # noqa: BLE001 - what watches a job never ends it
            if not self._is_blind:
                self._is_blind = True
                what = f"{type(error).__name__}: {error}"
                self._say(f"whether the job hangs cannot be found out: {what}")
            self._asked = None
            with contextlib.suppress(OSError):  # the same disk
                hang_files.withdraw(self._forge)

    def explain(self, outcome: Outcome) -> Outcome:
        """How an attempt ended, where it was ended for a hang; else as it was."""
        hang = self._ended_for
        if hang is None or outcome.is_finished or outcome.asked is not None:
            return outcome
        code = int(ExitCode.FORCED)
        return Outcome(code, said=Reason.hung, text=str(hang), hung_at=hang.who.step)

    def _look(self, live: set[int], failed: list[int]) -> None:
        if self._asked is None and (found := hang_files.read(self._forge, self._attempt)):
            self._ask(found)
        question = self._asked
        if question is None:
            return
        for rank in live - self._answers.keys():
            if (given := hang_files.answer_of(self._forge, rank, question)) is not None:
                self._answers[rank] = given
        answers = {rank: one for rank, one in self._answers.items() if rank in live}
        waits_s = _ANSWER_S if question.phase is Phase.expired else _STACKS_S
        excuse = self._excuse(answers, failed)
        if not excuse and live - answers.keys() and self._waited_s < waits_s:
            return
        if not excuse and not any(one.is_expired for one in answers.values()):
            excuse = "nobody waits any more"  # the one that has asked is out of its Run by now
        if excuse:
            self._withdraw(question, excuse)
        elif question.phase is Phase.expired:
            self._ask(hang_files.ask_for_stacks(self._forge, question, self._make_folder()))
        else:
            known = {**self._before, **answers}
            self._act(question, {rank: known[rank] for rank in sorted(known.keys() & live)}, live)

    def _ask(self, question: Question) -> None:
        self._before = self._answers if question.folder else {}
        self._asked, self._waited_s, self._answers = question, 0.0, {}

    def _excuse(self, answers: dict[int, Answer], failed: list[int]) -> str:
        """Why a job whose rank waits does not hang; empty: it does."""
        if failed:
            return f"rank {failed[0]} has failed: the others may save and leave"
        for rank, one in sorted(answers.items()):
            if one.excuse:
                return f"rank {rank} {one.excuse}"
            if one.count != self._before.get(rank, one).count:
                return f"rank {rank} has made progress since"
        return ""

    def _withdraw(self, question: Question, why: str) -> None:
        self._record("no hang", rank=question.rank, because=why)
        if question.folder:
            shutil.rmtree(self._directory / question.folder, ignore_errors=True)
        hang_files.withdraw(self._forge)
        self._asked = None

    def _make_folder(self) -> str:
        """The next of `hangs/<n>`, relative to the job's directory."""
        above = self._directory / FOLDER
        make_directory(above)
        numbers = [int(name) for name in os.listdir(above) if name.isdecimal()]
        name = f"{FOLDER}/{1 + max(numbers, default=0)}"
        (self._directory / name).mkdir()
        return name

    def _act(self, question: Question, answers: dict[int, Answer], live: set[int]) -> None:
        hang = blame(question, answers, live)
        then = "left alone" if self._action is HangAction.warn else "ended"
        then = f"the job is {then} (`resilience.hang.action={self._action.name}`)"
        self._say(f"{hang}; {then}; stacks, and what to do, are in {question.folder}/summary.txt")
        self._record("hang", **hang.fields, action=self._action.name, folder=question.folder)
        with contextlib.suppress(OSError):  # a full disk: the message says the most of it
            folder = self._directory / question.folder
            ranks = {str(rank): asdict(one) for rank, one in answers.items()}
            write_json(folder / "summary.json", hang.fields | {"ranks": ranks})
            write_atomically(folder / "summary.txt", _text(hang, answers, live))
        if self._action is HangAction.warn:
            hang_files.withdraw(self._forge)
            self._asked = None
        else:
            hang_files.end(self._forge, question)
            self._ended_for = hang


def blame(question: Question, answers: dict[int, Answer], live: set[int]) -> Hang:
    """Which rank holds up the others.

    Args:
        question: Who asked is it where nothing else says more.
        answers: Of each rank that has answered.
        live: All ranks that have not ended.
    """
    left, because = list(answers.values()), "it is the only one"
    if len(left) > 1:
        because = "nothing tells it from the others; it was the first to say so"
    for narrow, why in (
        (_lowest, "it has done the fewest steps"),
        (_not_waiting, "the others wait in a collective"),
        (_elsewhere, "it stands elsewhere than most"),
        (_not_in_torch, "it stands outside of torch, where others may wait for it"),
    ):
        fewer = narrow(left)
        if len(fewer) < len(left):
            left, because = fewer, why
    found = next((one for one in left if one.rank == question.rank), left[0])
    if not found.limit_s:  # it is outside of its Run
        found = replace(found, limit_s=max(one.limit_s for one in answers.values()))
    if missing := sorted(live - answers.keys()):
        found = replace(found, rank=missing[0], node="", pid=0, line="", inside="")
        because = "it does not answer; is its node there?"
    return Hang(found, because)


def _lowest(left: list[Answer]) -> list[Answer]:
    least = min(one.step for one in left)
    return [one for one in left if one.step == least]


def _not_waiting(left: list[Answer]) -> list[Answer]:
    return [one for one in left if one.section != _WAITS] or left


def _elsewhere(left: list[Answer]) -> list[Answer]:
    """Those that are not where the most are."""
    frames = Counter((one.line, one.inside) for one in left)
    (most, number), *others = frames.most_common()
    if not others or others[0][1] == number:
        return left
    return [one for one in left if (one.line, one.inside) != most]


def _not_in_torch(left: list[Answer]) -> list[Answer]:
    """Of two ranks neither is elsewhere than most; a collective is waited for in torch."""
    return [one for one in left if _TORCH not in one.inside] or left


_ADVICE = """
If it was slow and did not hang: raise `resilience.hang.timeout_s`, or `resilience.hang.start_s` for
the start, for first steps, saves and evaluations, and for compilations. A long evaluation shows
that it makes progress by calling `run.check_stop()` for each batch."""


def _text(hang: Hang, answers: dict[int, Answer], live: set[int]) -> str:
    log = f"{OUTPUT}{suffix(hang.who.rank)}"
    lines = [f"{hang}", f"What it has printed is in {log}.", _ADVICE, ""]
    for rank in sorted(live):
        one = answers.get(rank)
        if one is None:
            lines.append(f"rank {rank}: no answer")
            continue
        where = f"`{one.section}` at step {one.step} for {one.waited_s:.0f} s"
        lines.append(f"rank {rank} on {one.node}, process {one.pid}: {where}")
        lines += [f"    {frame}" for frame in dict.fromkeys((one.line, one.inside)) if frame]
    return "\n".join(lines) + "\n"
