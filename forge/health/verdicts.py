"""Applies the policy to the findings of health checks: a failure is logged, or the job stops."""

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
from forge.group.requests import FailureReport, StopRequest
from forge.health.check import Answer, Check, Scope
from forge.jobdir import node_fault


@dataclass(frozen=True)
class Refusal:
    """The decision that the job must stop on this node."""

    text: str
    """Why, for people."""
    reason: Reason
    """`halted` if the job must not be started again."""
    is_doubtful: bool
    """Whether the state can be wrong since the last checkpoint, and is not saved."""

    @property
    def exit(self) -> Exit:
        """The exit of a job that has not begun to train."""
        return Exit(ExitCode.UNHEALTHY, self.text, self.reason)

    @property
    def fact(self) -> StopRequest | FailureReport:
        """The request that stops a running training at its next step boundary."""
        code = int(ExitCode.UNHEALTHY)
        if self.is_doubtful:
            return FailureReport(code, self.text, self.reason)
        return StopRequest(code, self.reason, text=self.text)


class Verdicts:
    """Decides on the findings of one attempt, on one rank.

    Args:
        job: The job's directory.
        rank: This process's number.
        note: Writes an event to the ledger.
    """

    def __init__(self, job: Path, rank: int, note: Callable[..., None]) -> None:
        self._job = job
        self._rank = rank
        self._note = note
        self._logged: set[str] = set()
        """The checks whose failure or crash was logged since they last passed."""
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        """Slurm's name of this node."""

    def judge(self, check: Check, action: CheckAction, answer: Answer) -> Refusal | None:
        """Log a failure, once until the check passes again, and decide whether the job stops.

        Returns:
            None if the job can continue here.
        """
        finding, name = answer.finding, check.name
        if answer.error and name not in self._logged:
            self._logged.add(name)
            self._log(name, f"Health check `{name}` crashed, and was ignored: {answer.error}")
        if finding is None:
            return None
        if not finding.is_failed:
            self._logged.discard(name)
            return None
        where = f" on {self.node}" if finding.culprits is None else ""
        text = f"Health check `{name}` failed{where}: {finding.value}"
        advice = f". {finding.remedy}" if finding.remedy else "."
        # A finding of all ranks is logged by rank 0 only.
        is_mine = check.scope is not Scope.ranks or self._rank == 0
        if action is CheckAction.warn or finding.only_warns:
            key = _key(check)
            why = f"whatever `{key}` is" if finding.only_warns else f"`{key}=warn`"
            if is_mine and name not in self._logged:
                self._logged.add(name)
                self._log(name, f"{text}{advice} Only logged ({why}).", action="warn")
            return None
        # Without a node if this one is not a culprit: otherwise the first node to report would be
        # excluded as faulty.
        is_own = finding.culprits is None or self._rank in finding.culprits
        node = self.node if is_own else ""
        node_fault.write(self._job, node_fault.NodeFault(node, name, text, action.name))
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
    """The key of the policy with the action of a check."""
    if check.is_command:
        return f"resilience.{COMMANDS}{check.name}.action"
    return f"resilience.health.checks.{check.name}"
