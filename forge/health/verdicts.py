"""Applies the policy to the findings of health checks: a failure is logged, or the job stops."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from forge import messages
from forge.config.conversion import COMMANDS
from forge.config.schema import CheckAction
from forge.errors import Exit, ExitCode, Reason
from forge.health.check import Answer, Check, Scope
from forge.jobdir import node_fault


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
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        """Slurm's name of this node."""

    def judge(self, check: Check, action: CheckAction, answer: Answer) -> Exit | None:
        """Log a failure, and decide whether the job stops.

        Returns:
            The exit of the job; None if it can continue here.
        """
        finding, name = answer.finding, check.name
        if answer.error:
            self._log(name, f"Health check `{name}` crashed, and was ignored: {answer.error}")
        if finding is None or not finding.is_failed:
            return None
        where = f" on {self.node}" if finding.culprits is None else ""
        text = f"Health check `{name}` failed{where}: {finding.value}"
        advice = f". {finding.remedy}" if finding.remedy else "."
        # A finding of all ranks is logged by rank 0 only.
        is_mine = check.scope is not Scope.ranks or self._rank == 0
        if action is CheckAction.warn or finding.only_warns:
            key = _key(check)
            why = f"whatever `{key}` is" if finding.only_warns else f"`{key}=warn`"
            if is_mine:
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
        return Exit(ExitCode.UNHEALTHY, full, reason)

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
