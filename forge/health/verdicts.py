"""What the policy makes of what the checks of an attempt find: it is logged, or the job leaves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forge import messages
from forge.config.conversion import COMMANDS
from forge.config.schema import CheckAction
from forge.errors import Exit, ExitCode, Reason
from forge.group.facts import Failed, StopAsked
from forge.health.check import Answer, Check, Scope
from forge.jobdir import sick


@dataclass(frozen=True)
class Refusal:
    """The job is not to run here any longer."""

    text: str
    """Why, for people."""
    reason: Reason
    """`halted` where it is not to be started again."""
    is_doubtful: bool
    """Whether what was computed since the last checkpoint is not to be saved."""

    @property
    def exit(self) -> Exit:
        """How a job leaves that has not begun to train."""
        return Exit(ExitCode.UNHEALTHY, self.text, self.reason)

    @property
    def fact(self) -> StopAsked | Failed:
        """How a training leaves, at its next boundary."""
        code = int(ExitCode.UNHEALTHY)
        if self.is_doubtful:
            return Failed(code, self.text, self.reason)
        return StopAsked(code, self.reason, text=self.text)


class Verdicts:
    """The judge of one attempt, on one rank.

    Args:
        job: The job's directory.
        rank: This process's number.
        note: Writes an event into the ledger.
    """

    def __init__(self, job: Path, rank: int, note: Callable[..., None]) -> None:
        self._job = job
        self._rank = rank
        self._note = note
        self._logged: set[str] = set()
        """The checks of which a failure was logged, and those that could not be made, since they
        passed last."""
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        """As Slurm knows it."""

    def judge(self, check: Check, action: CheckAction, answer: Answer) -> Refusal | None:
        """Log that a check has failed, unless it has not passed since that was logged.

        Returns:
            None if the job may stay.
        """
        finding, name = answer.finding, check.name
        if answer.error and name not in self._logged:
            self._logged.add(name)
            self._log(name, f"Health check `{name}` could not be made: {answer.error}")
        if finding is None:
            return None
        if not finding.is_failed:
            self._logged.discard(name)
            return None
        where = f" on {self.node}" if finding.culprits is None else ""
        text = f"Health check `{name}` failed{where}: {finding.value}"
        advice = f". {finding.remedy}" if finding.remedy else "."
        # What all ranks find, one of them says.
        is_mine = check.scope is not Scope.ranks or self._rank == 0
        if action is CheckAction.warn or finding.only_warns:
            why = "whatever its action" if finding.only_warns else f"`{_key(check)}=warn`"
            if is_mine and name not in self._logged:
                self._logged.add(name)
                self._log(name, f"{text}{advice} Only logged ({why}).", action="warn")
            return None
        # Of no node, if it is not this one: else the first that leaves would be taken for sick.
        is_own = finding.culprits is None or self._rank in finding.culprits
        node = self.node if is_own else ""
        sick.write(self._job, sick.Sick(node, name, text, action.name))
        if is_mine:
            self._note_down(name, text, action=action.name)
        is_halt = action is CheckAction.halt
        what = "The job ends, and is not started again" if is_halt else "The job leaves this node"
        reason = Reason.halted if is_halt else Reason.unhealthy
        full = f"{text}{advice} {what} (`{_key(check)}={action.name}`)"
        return Refusal(full, reason, check.is_doubtful)

    def _log(self, name: str, text: str, **values: str) -> None:
        messages.warn(text)
        self._note_down(name, text, **values)

    def _note_down(self, name: str, text: str, **values: str) -> None:
        self._note("health", check=name, node=self.node, text=text, **values)


def _key(check: Check) -> str:
    """The key of the policy that gives a check its action."""
    if check.is_command:
        return f"resilience.{COMMANDS}{check.name}.action"
    return f"resilience.health.checks.{check.name}"
