"""What the policy makes of what the checks of an attempt find: it is logged, or the job leaves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge import messages
from forge.config.conversion import COMMANDS
from forge.config.schema import CheckAction, CheckConfig
from forge.config.strict import STRICT
from forge.errors import Exit, ExitCode, Reason
from forge.group.facts import Failed, StopAsked
from forge.health.check import Answer, Check, Finding, Scope
from forge.jobdir import sick

_WOULD = {
    CheckAction.refuse: "leave this node",
    CheckAction.exclude_node: "exclude this node",
    CheckAction.halt: "end the job",
}


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
        self._said: set[tuple[str, object]] = set()
        """(check, what of it was logged) since it passed last; not the values, which change."""
        self._logged: dict[str, str] = {}
        """What was found -> the check that it was logged of."""
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        """As Slurm knows it."""

    def judge(self, check: Check, config: CheckConfig, answer: Answer) -> Refusal | None:
        """Log that a check has failed, unless it has not passed since that was logged.

        Returns:
            None where the job may stay.
        """
        if answer.error:
            text = f"Health check `{check.name}` was not made: {answer.error}"
            self._log(check.name, "not made", text)
        finding = answer.finding
        if finding is None:
            return None
        if not finding.is_failed:
            self._said = {one for one in self._said if one[0] != check.name}
            return None
        where = f" on {self.node}" if finding.culprits is None else ""
        limit = "" if config.threshold is None else f" (threshold {config.threshold:g})"
        text = f"Health check `{check.name}` failed{where}: {finding.value}{limit}"
        advice = f". {finding.remedy}" if finding.remedy else "."
        if config.action is CheckAction.warn:
            if self._is_to_be_logged(check, finding):
                text = f"{text}{advice} {_only_logged(check.name)}"
                self._log(check.name, finding.culprits, text, config.action)
            return None
        is_halt = config.action is CheckAction.halt
        # Of no node, where it is not this one: else the first that leaves would be taken for sick.
        node = self.node if self._is_own(finding) else ""
        sick.write(self._job, node, check.name, text, config.action.name)
        if check.scope is not Scope.ranks or self._rank == 0:
            self._note_down(check.name, config.action, text)
        what = "The job ends, and is not started again" if is_halt else "The job leaves this node"
        what += f" (`{_action(check.name, config.action)}`)"
        reason = Reason.halted if is_halt else Reason.unhealthy
        return Refusal(f"{text}{advice} {what}", reason, check.is_doubtful)

    def _is_to_be_logged(self, check: Check, finding: Finding) -> bool:
        if (check.name, finding.culprits) in self._said:
            return False
        if check.scope is Scope.task:
            # A GPU that is lost fails each of its checks, in the same words.
            return self._logged.setdefault(finding.value, check.name) == check.name
        return check.scope is not Scope.ranks or self._rank == 0  # once, not on every rank

    def _is_own(self, finding: Finding) -> bool:
        return finding.culprits is None or self._rank in finding.culprits

    def _log(self, name: str, what: object, text: str, action: CheckAction | None = None) -> None:
        if (name, what) in self._said:
            return
        self._said.add((name, what))
        messages.warn(text)
        self._note_down(name, action, text)

    def _note_down(self, name: str, action: CheckAction | None, text: str) -> None:
        values: dict[str, Any] = {"action": action.name} if action is not None else {}
        self._note("health", check=name, node=self.node, text=text, **values)


def _only_logged(name: str) -> str:
    """What the preset `strict` would have done: people see it before it happens."""
    strict = STRICT.get(name)
    if strict is None or strict is CheckAction.warn:
        return f"Only logged (`{_action(name, CheckAction.warn)}`)."
    return f"Only logged; the preset `strict` would {_WOULD[strict]} (`{_action(name, strict)}`)."


def _action(name: str, action: CheckAction) -> str:
    """The override that gives a check this action."""
    place = "health.checks." if name in STRICT else COMMANDS
    return f"resilience.{place}{name}.action={action.name}"
