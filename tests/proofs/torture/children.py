"""Forked children of a process that has everything imported: a thousand deaths in seconds.

The parent runs no operation of torch, so that it has no threads that a child would lack.
"""

from __future__ import annotations

import mmap
import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.checkpoint import fence

PATIENCE_S = 120.0
UNDISTURBED = "too few runs were disturbed at all"


@dataclass(frozen=True)
class Plan:
    """How much of a part is to be done."""

    root: Path
    """An empty directory."""
    seed: int = 0
    share: float = 1.0
    """Of all points, by chance; 1 takes every one."""
    break_forge: Callable[[], None] = lambda: None
    """Called in each child before anything else: see `broken`."""
    is_over_at_failure: bool = False

    def skips(self, rng: random.Random, counts: Counts) -> bool:
        """Whether the next point is not taken."""
        return rng.random() >= self.share or (self.is_over_at_failure and bool(counts.failures))


@dataclass
class Counts:
    """What a part of the suite did, and what it found."""

    numbers: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _hits: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0) + number

    def hit(self, name: str, is_hit: bool) -> None:
        """Note whether a run of this scenario got as far as the call that was to be disturbed.

        With threads one may make fewer calls than the one in which they were counted.
        """
        hits, tries = self._hits.get(name, (0, 0))
        self._hits[name] = (hits + is_hit, tries + 1)

    def check_hits(self) -> None:
        """Fail where almost all have to have got there, and did not."""
        for name, (hits, tries) in self._hits.items():
            if hits < 0.9 * tries:
                self.failures.append(f"{name}: {UNDISTURBED}, only {hits} of {tries}")

    def take(self, other: Counts) -> None:
        self.add(**other.numbers)
        self.failures += other.failures
        self._hits |= other._hits


class Shared:
    """A few numbers that a child writes and its parent reads, though the child was killed."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def __getitem__(self, index: int) -> int:
        return int.from_bytes(self._memory[8 * index : 8 * index + 8], "little")

    def __setitem__(self, index: int, value: int) -> None:
        self._memory[8 * index : 8 * index + 8] = value.to_bytes(8, "little")


class Child:
    """A fork that runs one function; what it returns or raises comes back."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._code: int | None = None
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            try:
                outcome = ("returned", function(*args))
            except BaseException:  # noqa: BLE001 - the parent tells it
                outcome = ("raised", traceback.format_exc())
            try:
                with os.fdopen(writer, "wb") as pipe:
                    pipe.write(pickle.dumps(outcome))
            finally:
                os._exit(0)
        os.close(writer)

    def is_stopped(self) -> bool:
        """Wait until it has stopped itself (SIGSTOP), or has ended."""
        status = os.waitpid(self.pid, os.WUNTRACED)[1]
        if os.WIFSTOPPED(status):
            return True
        self._code = os.waitstatus_to_exitcode(status)
        return False

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def result(self, timeout_s: float = PATIENCE_S) -> tuple[str, Any]:
        """("returned", value), ("raised", traceback), ("killed", signal) or ("hung", None)."""
        deadline, content, is_open = time.monotonic() + timeout_s, b"", True
        while is_open and time.monotonic() < deadline:
            if select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                piece = os.read(self._reader, 1 << 20)
                content, is_open = content + piece, bool(piece)
        os.close(self._reader)
        if is_open:
            os.kill(self.pid, signal.SIGKILL)
        code = self._code
        if code is None:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if is_open:
            return "hung", None
        return ("killed", -code) if code < 0 else pickle.loads(content)


class Checker:
    """A fork that answers one question after the other; cheaper than a fork for each."""

    def __init__(self, function: Callable[..., Any], plan: Plan) -> None:
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._to)
            os.close(self._from)
            with os.fdopen(to_child, "rb") as questions, os.fdopen(from_child, "wb") as answers:
                plan.break_forge()
                self._answer(function, questions, answers)
            os._exit(0)
        os.close(to_child)
        os.close(from_child)
        self._questions, self._answers = os.fdopen(self._to, "wb"), os.fdopen(self._from, "rb")

    @staticmethod
    def _answer(function: Callable[..., Any], questions: Any, answers: Any) -> None:
        while True:
            try:
                arguments = pickle.load(questions)
            except EOFError:
                return
            try:
                function(*arguments)
                problem = ""
            except BaseException:  # noqa: BLE001 - the parent tells it
                problem = traceback.format_exc()
            pickle.dump(problem, answers)
            answers.flush()

    def problem(self, *arguments: Any) -> str:
        """What the function raised, or nothing."""
        pickle.dump(arguments, self._questions)
        self._questions.flush()
        if not select.select([self._answers], [], [], PATIENCE_S)[0]:
            return "the check hung"
        return str(pickle.load(self._answers))

    def close(self) -> None:
        self._questions.close()
        self._answers.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def in_child(function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> Any:
    """Run it in a fork and return what it returns; a failure there is one here."""
    kind, value = Child(function, *args).result(timeout_s)
    if kind != "returned":
        raise AssertionError(f"a child {kind}: {value}")
    return value


def let_go() -> None:
    """Of directories that a failed check left claimed in this process."""
    fence._claimed_here.clear()


def die() -> None:
    """As `kill -9` from outside; nothing is flushed, no handler runs."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
