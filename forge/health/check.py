"""Health checks as values, and a way to run a check that can never block training.

A check has a name, which is also its key in the policy, and a function that examines one thing and
returns a `Finding`. A check does not log and does not end anything: `verdicts.py` applies the
policy to its finding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from forge import messages
from forge.errors import DiskFull, Exit, ExitCode, RankLost
from forge.group.group import Coordinator

TIMEOUT_S = 60.0
"""Timeout of a built-in check. Source: Slurm kills its own HealthCheckProgram after 60 s."""
_EXCHANGES = 5
"""More than the number of exchanges in the check of all ranks."""
_LOOK_S = 0.2
"""Seconds between two calls of `unless`."""


class Scope(Enum):
    """The tasks that run a check."""

    node = "node"
    """The first task of each node."""
    task = "task"
    """Each task, for its own devices."""
    ranks = "ranks"
    """All ranks together: each calls it at the same time."""


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    value: str
    """A few words, with the unit: `0.4 GiB free in /dev/shm`."""
    is_failed: bool = False
    """Whether the check failed."""
    only_warns: bool = False
    """Whether a failure is only logged, whatever the policy says."""
    remedy: str = ""
    """How people can fix it, in a sentence."""
    culprits: tuple[int, ...] | None = None
    """The ranks whose nodes failed; None: the node that ran the check."""


@dataclass(frozen=True)
class Context:
    """The input of a check."""

    checkpoint_dir: Path
    """Does not necessarily exist yet."""
    job: Path
    """The job's directory; its `.forge` exists."""
    devices: tuple[int, ...] = ()
    """The CUDA devices of this task, by CUDA's numbers."""
    ranks: Coordinator = field(default_factory=Coordinator)
    """All ranks; a check can call its `gather`."""
    is_first_of_node: bool = True
    """Whether this rank is the first of its node."""
    state_bytes: int = 0
    """The least size of a checkpoint of this process's objects; 0: unknown."""
    start_s: float = 0.0
    """Seconds that a start waits for a shared disk that does not answer."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the answer is no longer needed."""


@dataclass(frozen=True)
class Check:
    """One health check."""

    name: str
    """Its key in `health.checks`, or in `health.commands`."""
    look: Callable[[Context], Finding | None]
    """Returns the finding; None if the check does not apply here. The function can block. An
    exception does not count as a failure, except `DiskFull` and `RankLost`."""
    scope: Scope
    timeout_s: float = TIMEOUT_S
    """Seconds after which the check counts as failed."""
    is_shared: bool = False
    """Whether all nodes share what the check examines: if that does not answer, a restart on
    another node would wait for it, too."""
    is_command: bool = False
    """Whether the check is a command from `health.commands`."""


@dataclass(frozen=True)
class Answer:
    """The outcome of running a check."""

    finding: Finding | None = None
    """None if the check does not apply here, or crashed."""
    error: str = ""
    """The error of a check that crashed, which does not count as a failure."""

    @property
    def is_good(self) -> bool:
        """Whether the check has neither failed nor crashed."""
        return not self.error and (self.finding is None or not self.finding.is_failed)


def make(check: Check, context: Context, unless: Callable[[], bool] = lambda: False) -> Answer:
    """Run a check; it fails if it takes longer than its `timeout_s`.

    After a timeout, its thread stays blocked in the call that does not return.

    Args:
        check: The check.
        context: Its input.
        unless: As soon as it returns true, the wait ends without a finding.
    Raises:
        DiskFull: If the disk is full, which is not a fault of the node.
        Exit: With code 70, if what all nodes share does not answer within `context.start_s`.
    """
    answers: list[Answer | DiskFull] = []

    def look() -> None:
        try:
            answers.append(Answer(check.look(context)))
        except DiskFull as error:
            answers.append(error)
        except RankLost as lost:  # neither the reason nor the node is known
            remedy = "Find out what that rank waits for, and check the network."
            answers.append(Answer(Finding(str(lost), is_failed=True, remedy=remedy, culprits=())))
        except Exception as error:  # noqa: BLE001 - a check that crashes proves no fault of the node
            answers.append(Answer(error=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=look, name="forge-check", daemon=True)
    thread.start()
    # A check of all ranks has a timeout for each exchange, which all ranks notice together.
    is_of_all = check.scope is Scope.ranks
    limit_s = check.timeout_s * (_EXCHANGES if is_of_all else 1)
    _wait(thread, limit_s, unless)
    if not answers and check.is_shared and context.start_s > limit_s and not unless():
        messages.warn(
            f"The health check {check.name} has no answer within {limit_s:g} s: forge waits for the"
            f" file system of {context.checkpoint_dir}, for {context.start_s:g} s at most"
        )
        _wait(thread, context.start_s - limit_s, unless)
        if not answers and not unless():
            text = (
                f"the file system of {context.checkpoint_dir} has not answered within"
                f" `resilience.hang.start_s={context.start_s:g}`"
            )
            raise Exit(int(ExitCode.FORCED), text)
    if not answers:
        return Answer(None if unless() else _late(check))
    if isinstance(answers[0], DiskFull):
        raise answers[0]
    return answers[0]


def _wait(thread: threading.Thread, seconds: float, unless: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0 and not unless():
        thread.join(min(left_s, _LOOK_S))


def _late(check: Check) -> Finding:
    """The finding for a check that timed out."""
    return Finding(
        f"no answer within {check.timeout_s:g} s",
        is_failed=True,
        only_warns=check.is_shared,
        remedy="Find out what the check waits for.",
        # In a check of all ranks, any rank can be the culprit.
        culprits=() if check.scope is Scope.ranks else None,
    )
