"""What a health check is, and how one is made without its ever holding up a run.

A check is a value: its name, which is also its key in the policy, and a function that looks at one
thing and says what it has found. It neither logs nor ends anything: `verdicts.py` knows what the
policy makes of a finding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from forge.config.schema import CheckAction
from forge.errors import DiskFull, RankLost
from forge.group.group import Group, Solo

TIMEOUT_S = 60.0
"""Seconds after which a built-in check has failed. Source: Slurm's own HealthCheckProgram is ended
after 60 s."""
_EXCHANGES = 5
"""More than the ranks have in their check."""
_LOOK_S = 0.2
"""Seconds until somebody who may have to leave is asked again."""


class Scope(Enum):
    """Who makes a check."""

    node = "node"
    """The first task of each node."""
    task = "task"
    """Each task, of its own devices."""
    ranks = "ranks"
    """All ranks together, each of which calls it at the same time."""


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    value: str
    """In a few words, with its unit: `0.4 GiB free in /dev/shm`."""
    is_failed: bool = False
    """Whether something is wrong."""
    only_warns: bool = False
    """Whether that is only logged, whatever the policy says."""
    remedy: str = ""
    """What people can do about it, in a sentence."""
    culprits: tuple[int, ...] | None = None
    """Whose nodes have failed, by rank; None: the one that the check was made on."""


@dataclass(frozen=True)
class Context:
    """What a check may look at."""

    checkpoint_dir: Path
    """It may not be there yet."""
    job: Path
    """The job's directory; `.forge` in it is there."""
    devices: tuple[int, ...] = ()
    """The CUDA devices that are this task's own, as CUDA counts."""
    ranks: Group = field(default_factory=Solo)
    """All ranks; `gather` is what a check may use of it."""
    is_first_of_node: bool = True
    """Whether this rank is the first of its node."""
    state_bytes: int = 0
    """What a checkpoint of this process's objects takes at least; 0: unknown."""
    action: CheckAction = CheckAction.warn
    """What the policy makes of a failure of this check."""
    is_beside: bool = False
    """Whether a training runs meanwhile; else it waits for the checks."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set once nobody waits for the answer any more."""


@dataclass(frozen=True)
class Check:
    """One health check."""

    name: str
    """Its key in `health.checks`, or in `health.commands`."""
    look: Callable[[Context], Finding | None]
    """Says what it has found; None if it does not apply here. It may block; what it raises is no
    verdict, except `DiskFull` and `RankLost`."""
    scope: Scope
    is_passive: bool = False
    """Whether it may run beside training: it computes nothing on a GPU, writes nothing then, and
    meets no other rank."""
    is_doubtful: bool = False
    """Whether a failure puts in doubt what was computed since the last checkpoint."""
    timeout_s: float = TIMEOUT_S
    """Seconds after which it has failed."""
    is_command: bool = False
    """Whether it is a site's own."""


@dataclass(frozen=True)
class Answer:
    """How one check went."""

    finding: Finding | None = None
    """None if it does not apply here, and if it could not be made."""
    error: str = ""
    """Why it could not be made: no verdict on the node."""
    left: threading.Thread | None = None
    """What is still at it, if it has not answered in time."""

    @property
    def is_pending(self) -> bool:
        """Whether it still runs, so that it cannot be made again."""
        return self.left is not None and self.left.is_alive()


def make(check: Check, context: Context, unless: Callable[[], bool] = lambda: False) -> Answer:
    """Make one check; it fails if it takes longer than its `timeout_s`.

    Its thread stays behind then, blocked in a call that does not return.

    Args:
        check: Which.
        context: What it looks at.
        unless: Once it comes true nobody waits any longer, and nothing is found.
    Raises:
        DiskFull: If the disk is: that is no fault of the node's.
    """
    answers: list[Answer | DiskFull] = []

    def look() -> None:
        try:
            answers.append(Answer(check.look(context)))
        except DiskFull as error:
            answers.append(error)
        except RankLost as lost:  # it is not known why, nor whose node is to blame
            remedy = "Find out what that rank waits for, and check the network."
            answers.append(Answer(Finding(str(lost), is_failed=True, remedy=remedy, culprits=())))
        except Exception as error:  # noqa: BLE001 - who cannot look has seen no fault of the node
            answers.append(Answer(error=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=look, name="forge-check", daemon=True)
    thread.start()
    # Ranks that meet have a limit for each exchange; one that is not kept, they notice together.
    is_of_all = check.scope is Scope.ranks
    deadline = time.monotonic() + check.timeout_s * (_EXCHANGES if is_of_all else 1)
    while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0 and not unless():
        thread.join(min(left_s, _LOOK_S))
    if not answers:
        return Answer(None if unless() else _late(check, context), left=thread)
    if isinstance(answers[0], DiskFull):
        raise answers[0]
    return answers[0]


def _late(check: Check, context: Context) -> Finding:
    """What is found of a check that does not answer."""
    return Finding(
        f"no answer within {check.timeout_s:g} s",
        is_failed=True,
        # A file system may be busy with what the training itself reads and writes.
        only_warns=context.is_beside and check.scope is Scope.node,
        remedy="Find out what the check waits for.",
        # Of ranks that meet any may be to blame.
        culprits=() if check.scope is Scope.ranks else None,
    )
