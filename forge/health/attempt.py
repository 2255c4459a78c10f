"""The health checks of one attempt: all of them before it trains, the passive ones beside that.

    at the start   of the node by its first task, of its own GPUs by each, then all ranks together
    beside         every `health.every_s` a thread looks again; what it finds is proposed to all
                   ranks, which leave together at a boundary

All ranks have the same policy, and so make the same checks in the same order.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forge import messages
from forge.config.schema import CheckAction, HealthConfig
from forge.errors import ConfigError
from forge.group.group import Group, Solo
from forge.health import command
from forge.health.check import Answer, Check, Context, Scope, make
from forge.health.table import CHECKS
from forge.health.verdicts import Refusal, Verdicts
from forge.process import world

_LEAVE_S = 2.0
"""Seconds that leaving waits for the thread: a check that hangs is left behind."""


class Health:
    """What looks after one attempt's node, on one rank.

    Args:
        config: Of the checks.
        context: Of this rank.
        note: Writes an event into the ledger.
        is_stopping: Whether this process is to leave: then it does not wait for checks of its own.
    """

    def __init__(
        self,
        config: HealthConfig,
        context: Context,
        note: Callable[..., None] = lambda kind, **values: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._context = context
        self._is_stopping = is_stopping
        self._verdicts = Verdicts(context.job, context.ranks.rank, note)
        self._answers: dict[str, Answer] = {}
        """By check, the last one: what has not answered in time may still run."""
        self._thread: threading.Thread | None = None

    # -- at the start ----------------------------------------------------------------------------

    def check_node(self) -> None:
        """Make the checks of this node and of this task's devices.

        Raises:
            Exit: With code 69, if one fails and the policy says more than to log it.
            DiskFull: If the disk is full, which is no fault of the node's.
        """
        self._check(Scope.node, Scope.task)

    def check_ranks(self) -> None:
        """Make the checks of the ranks against each other; every rank has to call it.

        Raises:
            Exit: As `check_node`.
        """
        self._check(Scope.ranks)

    def _check(self, *scopes: Scope) -> None:
        for check, action in asked_for(self._config, self._context, *scopes):
            refusal = self._made(check, action)
            if refusal is not None:
                if check.scope is not Scope.ranks or self._context.ranks.rank == 0:
                    messages.say(f"{refusal.exit}.", logging.ERROR)
                raise refusal.exit

    @property
    def limit_s(self) -> float:
        """Seconds that the checks of a rank may take together, before the others give it up."""
        every = asked_for(self._config, replace(self._context, is_first_of_node=True))
        return sum(check.timeout_s for check, _ in every if check.scope is not Scope.ranks)

    def _made(self, check: Check, action: CheckAction) -> Refusal | None:
        # The ranks meet in theirs: all of them make it, or none.
        is_left = bool if check.scope is Scope.ranks else self._is_stopping
        if is_left() or self._answers.get(check.name, Answer()).is_pending:
            return None
        answer = make(check, replace(self._context, action=action), is_left)
        self._answers[check.name] = answer
        if self._context.stopped.is_set():
            return None  # the end of the attempt may have caused it
        return self._verdicts.judge(check, action, answer)

    # -- beside training -------------------------------------------------------------------------

    def watch(self) -> None:
        """Repeat the passive checks in a thread, until `close`."""
        every_s = self._config.every_s
        if every_s is None or not self._config.enabled:
            return
        self._context = replace(self._context, is_beside=True)
        self._thread = threading.Thread(
            target=self._repeat, args=(every_s,), name="forge-monitor", daemon=True
        )
        self._thread.start()

    def _repeat(self, every_s: float) -> None:
        due = time.monotonic() + every_s
        while not self._context.stopped.wait(max(due - time.monotonic(), 0.0)):
            try:
                refusal = self._look()
            except Exception as error:  # noqa: BLE001 - a watch that fails must not end a training
                messages.warn(f"Health checks in the background stopped with an error: {error!r}")
                return
            if refusal is not None:
                self._context.ranks.propose(refusal.fact)
                return
            due = max(due + every_s, time.monotonic())  # none is made up for

    def _look(self) -> Refusal | None:
        """The first refusal of a round."""
        for check, action in asked_for(self._config, self._context):
            if check.is_passive and not self._context.stopped.is_set():
                refusal = self._made(check, action)
                if refusal is not None:
                    return refusal
        return None

    def stop(self) -> None:
        """The attempt leaves: what is found from now on, its end may have caused."""
        self._context.stopped.set()

    def close(self) -> None:
        """Give up; the thread ends by itself where it hangs in a check."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
            self._thread = None


def asked_for(
    config: HealthConfig, context: Context, *scopes: Scope
) -> list[tuple[Check, CheckAction]]:
    """The checks of these scopes, or of all, that this rank makes, in order, with their actions."""
    checks = [(check, config.checks[check.name]) for check in CHECKS]
    checks += [(command.check(name, one), one.action) for name, one in config.commands.items()]
    return [
        (check, action)
        for check, action in checks
        if config.enabled and action is not CheckAction.ignore
        if check.scope in (scopes or Scope)
        if check.scope is not Scope.node or context.is_first_of_node
    ]


def here(
    config: HealthConfig,
    job: Path,
    checkpoint_dir: Path,
    ranks: Group | None = None,
    state_bytes: int = 0,
) -> Context:
    """What the checks of this rank may look at.

    Args:
        config: Of the checks.
        job: The job's directory.
        checkpoint_dir: Where it saves.
        ranks: All ranks of the job; None: there is no other.
        state_bytes: What a checkpoint of this rank's objects takes at least.
    """
    ranks = ranks or Solo()
    try:
        own = world.of(os.environ)
    except ConfigError:  # torch.distributed was initialised by other means
        rank = os.environ.get("LOCAL_RANK", "")
        own = world.World(local_rank=int(rank) if rank.isdecimal() else 0)
    return Context(
        checkpoint_dir=checkpoint_dir,
        job=job,
        devices=devices() if config.enabled else (),
        ranks=ranks,
        is_first_of_node=own.local_rank == 0,
        state_bytes=state_bytes,
    )


def devices() -> tuple[int, ...]:
    """The CUDA devices that are this task's own; asking opens no context."""
    from forge.health.devices import own_devices  # it needs torch

    return tuple(own_devices())
