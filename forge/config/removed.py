"""Keys that no longer exist, and what to use instead.

In a user's config such a key is an error that names the replacement. A job that was started by an
earlier version stores its policy in files (`.forge/config.yaml`, a pickled config): there the key
is ignored, with one notice per start.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from forge import messages

_SHOWN = 8
"""Number of ignored keys that a notice lists."""

_COMMAND = (
    "A command of your own can check that: `resilience.health.commands` (docs/how-to/health.md)."
)
_RANKS = "This check is now part of `resilience.health.checks.ranks`."
_DISK = (
    "This check is now part of `resilience.health.checks.disk`. If space or inodes are low, forge"
    " only logs it, whatever the action of `disk`."
)

REMOVED: dict[str, str] = {
    **{
        f"health.checks.{name}": instead
        for instead, names in {
            _COMMAND: (
                *("temperature", "clocks", "pcie", "throttle", "retired_pages"),
                *("memory", "processes", "clock_skew", "straggler"),
                *("ecc", "row_remap", "recovery_action"),
            ),
            _RANKS: ("collective", "shared_directory"),
            _DISK: ("room", "inodes"),
        }.items()
        for name in names
    },
    "health.checks.*.action": (
        "Set the action as the value of the check: `resilience.health.checks.gpu=refuse`."
    ),
    "health.checks.*.threshold": ("The limits of checks can no longer be set. Remove the key."),
    "health.checks.*.timeout_s": "A check always has 60 s. Remove the key.",
    "checkpoint.on_foreign": (
        "forge no longer checks who owns a checkpoint. Remove the key; to keep other users from"
        " writing to the checkpoints, use `chmod -R go-w` on the checkpoint directory."
    ),
    "hang.factor": (
        "The factor is always 5: a step (or save, or evaluation) counts as a hang if it takes 5"
        " times as long as the slowest recent step (save, evaluation). To set a limit yourself, use"
        " `resilience.hang.timeout_s`."
    ),
    "hang.min_s": (
        "A learned time limit is always at least 300 s. To set a limit yourself, use"
        " `resilience.hang.timeout_s`."
    ),
    "signal.lead_s": "It is called `resilience.signal.warning_s` now.",
    "requeue.no_progress_limit": "It is called `resilience.requeue.max_no_progress` now.",
    "checkpoint.when_busy": "It is called `resilience.checkpoint.on_pending_save` now.",
    "requeue.max_unfair": (
        "This limit can no longer be set: a job ends if the cluster has ended 10 attempts in a row"
        " that had not saved yet. Remove the key."
    ),
}
"""Dotted key or group, without the leading `resilience.` -> its replacement; `*` is any name. The
first match counts."""


def _find(key: str) -> tuple[str, str] | None:
    """(the removed key or group to which `key` belongs, its replacement), if there is any."""
    parts = key.split(".")
    for pattern, instead in REMOVED.items():
        name = ".".join(parts[: pattern.count(".") + 1])
        if fnmatchcase(name, pattern):
            return name, instead
    return None


def problem(key: str) -> str | None:
    """The error for a user who sets a removed key; None for any other key."""
    found = _find(key)
    if found is None:
        return None
    name, instead = found
    return f"`resilience.{name}`: there is no such key any more. {instead}"


def without(policy: Mapping[Any, Any], prefix: str = "") -> tuple[dict[Any, Any], list[str]]:
    """The policy of a job that an earlier version started, without its removed keys.

    Args:
        policy: Plain containers, with interpolations as text.
        prefix: The dotted key of this group, with a final dot.
    Returns:
        (the policy, the keys that were left out).
    """
    kept: dict[Any, Any] = {}
    names: list[str] = []
    for name, value in policy.items():
        key = f"{prefix}{name}"
        if _find(key) is not None:
            names.append(key)
        elif isinstance(value, Mapping):
            group, inner = without(value, f"{key}.")
            names += inner
            if group or not value:  # else all of it was removed
                kept[name] = group
        else:
            kept[name] = value
    return kept, names


def notify(names: list[str]) -> None:
    """Log the ignored keys of a job's stored policy, if there are any."""
    if names:
        listed = messages.truncate_list([f"`resilience.{one}`" for one in names], _SHOWN)
        messages.warn(
            "This job was started by an earlier version of forge. Keys of its stored policy that no"
            f" longer exist are ignored: {listed}."
        )
