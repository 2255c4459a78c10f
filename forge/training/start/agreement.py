"""Checks that all ranks have the same policy, config, forge, torch and script.

Ranks that differ would still train together, and save wrong checkpoints that look good: for
example if one rank skips a NaN and another applies it.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from forge import messages
from forge._version import __version__
from forge.config.schema import Policy
from forge.errors import ConfigError
from forge.group.group import Exchange
from forge.jobdir import config_changes, flat_config, identity, job_dir
from forge.jobdir.identity import Identity
from forge.training.start import preflight

_SHOWN = 4
"""Number of ranks that one line lists."""
_ADVICE = """
    Start all ranks with the same values. If one is an argument that each rank needs (its number,
    its GPU), pass the other settings only: forge.Run(policy, config=…)."""


def check(
    exchange: Exchange, policy: Policy, name: str | None, config: dict[str, Any] | None
) -> None:
    """Compare all ranks with rank 0, in one exchange.

    Raises:
        ConfigError: On all ranks; names ranks and keys.
    """
    if exchange.ranks.size == 1:
        return
    ranks = exchange.all_gather("what each rank runs", lambda: _of_this_rank(policy, name, config))
    first = ranks[0]
    differing: dict[tuple[str, tuple[str, str]], list[int]] = defaultdict(list)
    for rank, one in enumerate(ranks):
        changed = config_changes.changes(first["values"], one["values"])
        changed += config_changes.differences(Identity(**first["job"]), Identity(**one["job"]))
        for each in changed:
            differing[each.key, each.shown].append(rank)
    problems = [
        f"`{key}` is {now} on rank {messages.truncate_list(numbers, _SHOWN)}, but {before} on rank"
        " 0"
        for (key, (before, now)), numbers in differing.items()
    ]
    if problems:
        problems[-1] += _ADVICE
        raise ConfigError(problems, "This job")


def _of_this_rank(policy: Policy, name: str | None, config: dict[str, Any] | None) -> Any:
    """The values to compare, as JSON: plain values by key, and the job's identity."""
    job, checkpoint_dir = job_dir.current(policy.checkpoint.dir, name)
    values, _ = flat_config.given(policy)
    values["resume"] = "changed" if preflight.is_change_wanted(policy) else "same"
    values["checkpoint.dir"] = _within(job, checkpoint_dir)
    values |= {"(forge)": __version__, "(torch)": torch.__version__, "(script)": _script()}
    return {"values": values, "job": identity.current(job, name or "", config).__dict__}


def _within(job: Path, path: Path) -> str:
    """A path relative to the job's directory, which each rank composes for itself."""
    return str(path.relative_to(job)) if path.is_relative_to(job) else str(path)


def _script() -> str | None:
    """A hash of what runs as `__main__`; None in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else None
    except OSError:
        return None  # the script was removed since it was started
