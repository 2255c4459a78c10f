"""The errors for keys that a policy does not have, with the key that was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from forge import messages
from forge.config import removed
from forge.config.schema import Policy

_NEIGHBOURS = 5
"""Number of keys that a message lists at most."""


OF_THE_SWEEP = {
    name: f"Set `hydra.launcher.{name}`."
    for name in (
        *("submitit_folder", "array_parallelism", "wait", "dry_run"),
        *("snapshot", "progress", "n_jobs"),
    )
} | {
    "signal_delay_s": "Set `resilience.signal.warning_s`.",
    "max_num_timeout": "Set `resilience.requeue.max_timeouts`.",
    "use_srun": "Remove it: forge always starts tasks with srun.",
}
"""Options that all jobs of a sweep share -> what to do instead."""


def problem(key: str, value: Any, known: Sequence[str]) -> str | None:
    """The error for a key that is not one of the known ones; None for an empty group."""
    refusal = refused(key)
    if refusal is not None:
        return refusal
    shown = f"`resilience.{key}={value}`"
    group = group_problem(key, known)
    if group is not None:  # {}: a group without any key
        return None if value == {} else f"{shown}: {group}"
    hint = suggestion(key, known) or "See conf/resilience/default.yaml."
    return f"{shown}: there is no such key. {hint}"


def refused(key: str) -> str | None:
    """The error for a removed key, or an option of the sweep; None for other keys."""
    return removed.problem(key) or _of_the_sweep(key)


def _of_the_sweep(key: str) -> str | None:
    """The error for an option of the whole sweep that is set for one job; None for other keys."""
    group, _, name = key.rpartition(".")
    if group != "slurm" or name not in OF_THE_SWEEP:
        return None
    what = f"`resilience.{key}`: is an option of the whole sweep, not of one job."
    return f"{what} {OF_THE_SWEEP[name]}"


_EXAMPLES = {
    "health.checks": "gpu=refuse",
    "checkpoint.best": "metric=val_loss",
    "shutdown": "timeout_s=60",
    "slurm": "timeout_min=60",
}
"""Group -> an override of one of its keys. For other groups: the first key with its default."""


def group_problem(key: str, known: Sequence[str]) -> str | None:
    """If this key is a group: the error for a value given to it, with some of its keys."""
    inside = f"{key}."
    members = [one.removeprefix(inside) for one in known if one.startswith(inside)]
    if not members:
        return None
    example = _EXAMPLES.get(key) or f"{members[0]}={_default(f'{key}.{members[0]}')}"
    some = messages.truncate_list(members, _NEIGHBOURS)
    return f"expected a group of keys ({some}), for example `resilience.{key}.{example}`."


def _default(key: str) -> str:
    """The default of a key, written as in an override."""
    value = OmegaConf.select(OmegaConf.structured(Policy), key)
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, str) else json.dumps(value)


_TIE = 0.01
"""Difference between two similarities below which neither key is suggested."""


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The existing key that is most similar to a mistyped one; None if two are equally so."""
    groups = {k.rsplit(".", n)[0] for k in known for n in range(1, k.count(".") + 1)}
    last = key.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == last]
    if len(same_name) == 1:
        return same_name[0]
    close = difflib.get_close_matches(key, [*known, *groups], n=2, cutoff=0.6)
    if not close:
        return None
    best, *second = (difflib.SequenceMatcher(None, one, key).ratio() for one in close)
    return None if second and best - second[0] < _TIE else close[0]


def suggestion(key: str, known: Sequence[str]) -> str:
    """The replacement for a key that does not exist: the nearest key, or its group's keys."""
    near = nearest_key(key, known)
    if near:
        return f"Did you mean `resilience.{near}`?"
    group = key.rpartition(".")[0]
    members = [one.removeprefix(f"{group}.") for one in known if one.startswith(f"{group}.")]
    if not members:
        return ""
    return f"`resilience.{group}` has the keys {', '.join(members)}."
