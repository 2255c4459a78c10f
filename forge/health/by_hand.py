"""The health checks made by hand: each with what it has found, whatever the policy would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from forge.config.schema import CheckConfig, HealthConfig
from forge.errors import DiskFull
from forge.health.attempt import asked_for
from forge.health.check import Answer, Check, Context, Finding, Scope, make

OK, FAILS, NOT_HERE, NOT_MADE = "ok", "FAILS", "not here", "not made"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    where: str
    """The node, or the rank."""
    verdict: str
    threshold: str
    found: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """For another rank."""
        return asdict(self)


def examine(config: HealthConfig, context: Context, where: str, *scopes: Scope) -> Iterator[Row]:
    """Make the checks of these scopes, one after the other.

    Args:
        config: Which, and with which thresholds.
        context: What they look at.
        where: The node or rank that this is.
    Yields:
        A row for each.
    """
    for check, one in asked_for(config, context, *scopes):
        try:
            answer = make(check, replace(context, config=one))
        except DiskFull as error:
            answer = Answer(Finding(str(error), is_failed=True, remedy="Make room."))
        yield row(check, one, answer, where)


def row(check: Check, config: CheckConfig, answer: Answer, where: str) -> Row:
    """What is shown of a check that was made."""
    threshold = "" if config.threshold is None else f"{config.threshold:g}"
    found = answer.finding
    if found is None:
        verdict = NOT_MADE if answer.error else NOT_HERE
        return Row(check.name, where, verdict, threshold, answer.error)
    if not found.is_failed:
        return Row(check.name, where, OK, threshold, found.value)
    return Row(check.name, where, FAILS, threshold, found.value, found.remedy)
