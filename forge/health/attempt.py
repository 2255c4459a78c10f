"""The health checks of one attempt, all of them before training.

The first task of a node checks the node, each task its GPUs, then all ranks check each other.

All ranks have the same policy, and therefore run the same checks in the same order: `CHECKS`, then
`health.commands`. Checks of GPUs and of several ranks load their code only in a task that has them.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forge import messages
from forge.config.schema import CheckAction, HealthConfig
from forge.errors import ConfigError, Exit
from forge.group.group import Coordinator
from forge.health import storage
from forge.health.check import Check, Context, Finding, Scope, make
from forge.process import world

_Look = Callable[[Context], Finding | None]


def _found(module: str, name: str) -> _Look:
    look: _Look = getattr(importlib.import_module(f"forge.health.{module}"), name)
    return look


def _of_gpus(module: str, name: str) -> _Look:
    return lambda context: _found(module, name)(context) if context.devices else None


def _of_ranks(context: Context) -> Finding | None:
    return _found("peers", "ranks")(context) if context.ranks.size > 1 else None


CHECKS: tuple[Check, ...] = (
    Check("disk", storage.disk, Scope.node, is_shared=True),
    Check("shm", storage.shm, Scope.node),
    Check("gpu", _of_gpus("product", "gpu"), Scope.task),
    Check("ranks", _of_ranks, Scope.ranks),
)
"""Their names are the keys of `health.checks`."""


class Health:
    """Runs the health checks of one attempt, on one rank.

    Args:
        config: The policy's section `health`.
        context: The context of this rank.
        note: Writes an event to the ledger.
        is_stopping: Whether this process is shutting down: then it does not wait for its checks.
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
        self._note = note

    def check_node(self) -> None:
        """Run the checks of this node and of this task's devices.

        Raises:
            Exit: With code 69, if a check fails whose action is not `warn`.
            DiskFull: If the disk is full, which is not a fault of the node.
        """
        self._check(Scope.node, Scope.task)

    def check_ranks(self) -> None:
        """Run the checks that all ranks make together; every rank has to call this.

        Raises:
            Exit: As `check_node`.
        """
        self._check(Scope.ranks)

    def _check(self, *scopes: Scope) -> None:
        for check, action in asked_for(self._config, self._context, *scopes):
            exit_ = self._made(check, action)
            if exit_ is not None:
                if check.scope is not Scope.ranks or self._context.ranks.rank == 0:
                    messages.say(f"{exit_}.", logging.ERROR)
                raise exit_

    @property
    def limit_s(self) -> float:
        """Seconds that all checks of a rank can take, before the other ranks stop waiting."""
        every = asked_for(self._config, replace(self._context, is_first_of_node=True))
        own = [check for check, _ in every if check.scope is not Scope.ranks]
        waits_s = self._context.start_s if any(one.is_shared for one in own) else 0.0
        return waits_s + sum(one.timeout_s for one in own)

    def _made(self, check: Check, action: CheckAction) -> Exit | None:
        # A check of all ranks contains collectives: all ranks run it, or none.
        is_left = bool if check.scope is Scope.ranks else self._is_stopping
        if is_left():
            return None
        answer = make(check, self._context, is_left)
        if answer.is_good:
            return None
        from forge.health.verdicts import Verdicts  # a healthy node needs none of it

        verdicts = Verdicts(self._context.job, self._context.ranks.rank, self._note)
        return verdicts.judge(check, action, answer)

    def close(self) -> None:
        """No answer is needed any more: a command that still runs is killed."""
        self._context.stopped.set()


def asked_for(
    config: HealthConfig, context: Context, *scopes: Scope
) -> list[tuple[Check, CheckAction]]:
    """The checks of these scopes (default: all) that this rank runs, with their actions."""
    checks = [(check, config.checks[check.name]) for check in CHECKS]
    if config.commands:
        from forge.health import command  # few sites have any

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
    ranks: Coordinator | None = None,
    state_bytes: int = 0,
    start_s: float = 0.0,
) -> Context:
    """The context for the checks of this rank.

    Args:
        config: The policy's section `health`.
        job: The job's directory.
        checkpoint_dir: The job's checkpoint directory.
        ranks: All ranks of the job; None: there is only this one.
        state_bytes: The least size of a checkpoint of this rank's objects.
        start_s: Seconds that a start waits for a shared disk that does not answer.
    """
    ranks = ranks or Coordinator()
    try:
        own = world.of(os.environ)
    except ConfigError:  # torch.distributed was initialised by other means
        rank = os.environ.get("LOCAL_RANK", "")
        own = world.RankInfo(local_rank=int(rank) if rank.isdecimal() else 0)
    return Context(
        start_s=start_s,
        checkpoint_dir=checkpoint_dir,
        job=job,
        devices=devices() if config.enabled else (),
        ranks=ranks,
        is_first_of_node=own.local_rank == 0,
        state_bytes=state_bytes,
    )


def devices() -> tuple[int, ...]:
    """The CUDA devices of this task; the query does not open a CUDA context."""
    from forge.health.devices import own_devices  # it needs torch

    return tuple(own_devices())
