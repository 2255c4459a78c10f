"""All-gathers of JSON values and of errors: if a call fails on one rank, it fails on all ranks."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, NoReturn

from forge.errors import DamagedCheckpoint, Exit, ExitCode, ForgeError, RankFailed
from forge.group.group import Coordinator

EXCHANGE_S = 1800.0
"""Timeout in seconds for a rank to write its files; if the run ends, the wait ends as well."""

_DAMAGE, _AGAIN, _END = 1, 2, 3
"""Weights of errors: an older checkpoint is read, the save is retried, the job ends."""


class Exchange:
    """All-gathers values through the store; each rank must make the same calls in the same order.

    Args:
        name: Unique among the exchanges of these ranks: another thread can have its own.
    """

    def __init__(self, ranks: Coordinator, name: str, timeout_s: float = EXCHANGE_S) -> None:
        self.ranks = ranks
        self._name = name
        self._timeout_s = timeout_s
        self._count = 0
        self._previous = ""

    def all_gather(
        self,
        what: str,
        make: Callable[[], Any],
        unless: Callable[[], object] | None = None,
        within_s: float | None = None,
    ) -> list[Any]:
        """All-gather the JSON result of `make`, in order of rank; empty once `unless` is true.

        Raises:
            OSError: If `make` raised one, here or on another rank.
            ForgeError: Likewise; if ranks raise different errors, one that ends the job wins.
        """
        if self.ranks.size == 1:
            return [make()]
        self._count += 1
        limit_s = self._timeout_s if within_s is None else within_s
        error: BaseException | None = None
        try:
            value = {"value": make()}
        except (Exception, Exit) as raised:  # noqa: BLE001 - raised again once all ranks know
            error, value = raised, _described(raised)
        key = f"{what} ({self._name} {self._count})"
        texts = self.ranks.gather(key, json.dumps(value).encode(), limit_s, unless)
        if not texts:
            return []
        if self._previous:  # all ranks have read it, or they would not be in this exchange
            self.ranks.forget(self._previous)
        self._previous = key
        found = [json.loads(text) for text in texts]
        worst = max((one.get("weight", 0), -rank) for rank, one in enumerate(found))
        if worst[0]:
            if error is not None and value["weight"] == worst[0]:
                raise error
            _raise_again(-worst[1], found[-worst[1]], error)
        return [one["value"] for one in found]

    def broadcast(self, what: str, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and broadcast its result."""
        return self.all_gather(what, make if self.ranks.rank == 0 else lambda: None)[0]


def _described(error: BaseException) -> dict[str, Any]:
    """An error as JSON; all ranks act on the error of the highest weight, so they do the same."""
    if isinstance(error, OSError):
        return {"error": str(error), "errno": error.errno or errno.EIO, "weight": _AGAIN}
    if isinstance(error, DamagedCheckpoint):
        return {"error": str(error), "weight": _DAMAGE}
    if isinstance(error, Exit):
        return {"error": error.text, "code": int(error.code or 0), "weight": _END}
    code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FORCED
    return {"error": f"{type(error).__name__}: {error}", "code": int(code), "weight": _END}


def _raise_again(rank: int, said: dict[str, Any], own: BaseException | None) -> NoReturn:
    text = f"rank {rank}: {said['error']}"
    if said["weight"] == _AGAIN:
        raise OSError(said["errno"], text) from own
    if said["weight"] == _DAMAGE:
        raise DamagedCheckpoint(text) from own
    raise RankFailed(text, said["code"]) from own
