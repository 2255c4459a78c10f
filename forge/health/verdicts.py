"""What the policy makes of what the checks of an attempt find: it is logged, or the job leaves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forge import messages
from forge.config.conversion import COMMANDS
from forge.config.schema import CheckAction, CheckConfig
from forge.config.strict import STRICT
from forge.errors import Exit, ExitCode, Reason
from forge.group.facts import Failed, StopAsked
from forge.health.check import Answer, Check, Scope
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
        self._said: set[tuple[object, ...]] = set()
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
        finding, name = answer.finding, check.name
        if answer.error and self._is_new(name, "not made"):
            self._log(name, f"Health check `{name}` was not made: {answer.error}")
        if finding is None:
            return None
        if not finding.is_failed:
            self._said = {one for one in self._said if one[0] != name}
            return None
        where = f" on {self.node}" if finding.culprits is None else ""
        limit = "" if config.threshold is None else f" (threshold {config.threshold:g})"
        text = f"Health check `{name}` failed{where}: {finding.value}{limit}"
        advice = f". {finding.remedy}" if finding.remedy else "."
        # What all ranks find, one of them says.
        is_mine = check.scope is not Scope.ranks or self._rank == 0
        if config.action is CheckAction.warn:
            # A GPU that is lost fails each of its checks, in the same words.
            is_first = (
                check.scope is not Scope.task
                or self._logged.setdefault(finding.value, name) == name
            )
            if is_mine and is_first and self._is_new(name, finding.culprits):
                self._log(name, f"{text}{advice} {_only_logged(name)}", action="warn")
            return None
        # Of no node, where it is not this one: else the first that leaves would be taken for sick.
        is_own = finding.culprits is None or self._rank in finding.culprits
        node = self.node if is_own else ""
        sick.write(self._job, sick.Sick(node, name, text, config.action.name))
        if is_mine:
            self._note_down(name, text, action=config.action.name)
        is_halt = config.action is CheckAction.halt
        what = "The job ends, and is not started again" if is_halt else "The job leaves this node"
        reason = Reason.halted if is_halt else Reason.unhealthy
        full = f"{text}{advice} {what} (`{_action(name, config.action)}`)"
        return Refusal(full, reason, check.is_doubtful)

    def _is_new(self, *what: object) -> bool:
        is_new = what not in self._said
        self._said.add(what)
        return is_new

    def _log(self, name: str, text: str, **values: str) -> None:
        messages.warn(text)
        self._note_down(name, text, **values)

    def _note_down(self, name: str, text: str, **values: str) -> None:
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
