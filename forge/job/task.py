"""The program that the ranks of a job run in one stage of an attempt.

    main       the user's main function, which uses forge
    command    a command of `forge exec`
    recovery   the command of a rule in `requeue.rules`: a first stage, before main or the command

All ranks run main and the command; a recovery command runs once, below the supervisor of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.jobdir.job_files import ATTEMPT, RECOVERS, RETURN_CODE
from forge.jobdir.plan import ExecPlan, JobPlan


@dataclass(frozen=True)
class Task:
    """A stage's program, and how to stop it."""

    words: list[str]
    """The command that starts it."""
    exec: ExecPlan | None = None
    """For a command: how to stop it, and what its exit code means; None: it is main."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of this stage."""
    kind: str = "attempt"
    """Name of the event in the job's ledger with which the stage begins."""

    @classmethod
    def of(cls, plan: JobPlan) -> Task:
        """Main, or the command."""
        return cls(plan.command, plan.exec)

    @classmethod
    def recovery(cls, plan: JobPlan, recovery: Mapping[str, int], attempt: int) -> Task:
        """The recovery command of a rule.

        Args:
            plan: The job's plan.
            recovery: The number of the rule, and the exit code that it is for (`Counts.recovery`).
            attempt: The number of the attempt before.
        """
        rule, code = recovery["rule"], recovery["code"]
        variables = {ATTEMPT: str(attempt), RETURN_CODE: str(code), RECOVERS: str(rule)}
        return cls(plan.requeue.rules[rule].recover, ExecPlan(), variables, "recovery")

    @classmethod
    def in_environment(cls, plan: JobPlan, environment: Mapping[str, str], rank: int) -> Task:
        """The task of a rank, in the process of its supervisor."""
        rule = environment.get(RECOVERS)
        if rule is None:
            return cls.of(plan)
        words = ["true"] if rank else plan.requeue.rules[int(rule)].recover
        return cls(words, ExecPlan())
