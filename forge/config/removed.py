"""Keys that no longer exist, and their replacements.

In a user's config such a key is an error that names the replacement. A job that was started by an
earlier version stores its policy in files (`.forge/config.yaml`, a pickled config): there the key
is ignored, with one notice per start. A key that the launcher itself wrote to `plan.json` is
ignored without a notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from forge import messages


@dataclass(frozen=True)
class Removed:
    """The replacement of a removed key."""

    instead: str
    """The replacement, in whole sentences."""
    is_now_its_group: bool = False
    """Whether its group takes the value: `checks.disk.action` -> `checks.disk`."""
    new_name: str | None = None
    """The new name of the key, in the same group."""


def _renamed(new_name: str, group: str) -> Removed:
    return Removed(f"It is called `resilience.{group}.{new_name}` now.", new_name=new_name)


_COMMAND = (
    "A command of your own can check that: `resilience.health.commands` (docs/how-to/health.md)."
)
_GPU_DRIVER = "This check is now part of `resilience.health.checks.gpu_driver`."
_RANKS = "This check is now part of `resilience.health.checks.ranks`."
_DISK = (
    "This check is now part of `resilience.health.checks.disk`. If space or inodes are low, forge"
    " only logs it, whatever the action of `disk`."
)

REMOVED: dict[str, Removed] = {
    **{
        f"health.checks.{name}": Removed(instead)
        for instead, names in {
            _COMMAND: (
                *("temperature", "clocks", "pcie", "throttle", "retired_pages"),
                *("memory", "processes", "clock_skew", "straggler"),
            ),
            _GPU_DRIVER: ("ecc", "row_remap", "recovery_action"),
            _RANKS: ("collective", "shared_directory"),
            _DISK: ("room", "inodes"),
        }.items()
        for name in names
    },
    "health.checks.*.action": Removed(
        "Set the action as the value of the check: `resilience.health.checks.gpu=refuse`.",
        is_now_its_group=True,
    ),
    "health.checks.*.threshold": Removed(
        "The limits of checks can no longer be set. Remove the key."
    ),
    "health.checks.*.timeout_s": Removed("A check always has 60 s. Remove the key."),
    "checkpoint.on_foreign": Removed(
        "forge no longer checks who owns a checkpoint. Remove the key; to keep other users from"
        " writing to the checkpoints, use `chmod -R go-w` on the checkpoint directory."
    ),
    "hang.factor": Removed(
        "The factor is always 5: a step (or save, or evaluation) counts as a hang if it takes 5"
        " times as long as the slowest recent step (save, evaluation). To set a limit yourself, use"
        " `resilience.hang.timeout_s`."
    ),
    "hang.min_s": Removed(
        "A learned time limit is always at least 300 s. To set a limit yourself, use"
        " `resilience.hang.timeout_s`."
    ),
    "signal.lead_s": _renamed("warning_s", "signal"),
    "requeue.no_progress_limit": _renamed("max_no_progress", "requeue"),
    "checkpoint.when_busy": _renamed("on_pending_save", "checkpoint"),
    "requeue.max_unfair": Removed(
        "This limit can no longer be set: a job ends if the cluster has ended 10 attempts in a row"
        " that had not saved yet. Remove the key."
    ),
}
"""Dotted key or group, without the leading `resilience.` -> its replacement; `*` is any name. The
first match counts."""

CLASSES = ("CheckConfig", "ChecksConfig", "OnForeign", "SlurmConfig", "WhenBusy")
"""Classes of `schema` that no longer exist."""


class Pickled:
    """Stands for an object of such a class: a group of keys, or a member of an enum."""

    def __init__(self, member: str = "") -> None:
        self.member = member


def plain(value: Any) -> Any:
    """A pickled policy of this or an earlier version, as plain containers."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Pickled) and "member" in vars(value):
        return value.member
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    group = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    return value if group is None else {name: plain(one) for name, one in group.items()}


def find(key: str) -> tuple[str, Removed] | None:
    """(the removed key or group to which `key` belongs, its replacement), if there is any."""
    pattern = _pattern(key)
    if pattern is None:
        return None
    return ".".join(key.split(".")[: pattern.count(".") + 1]), REMOVED[pattern]


def _pattern(key: str) -> str | None:
    """The first key of `REMOVED` that matches this key."""
    parts = key.split(".")
    for pattern in REMOVED:
        words = pattern.split(".")
        head = parts[: len(words)]
        if len(head) == len(words) and all(
            word in ("*", part) for word, part in zip(words, head, strict=True)
        ):
            return pattern
    return None


def problem(key: str) -> str | None:
    """The error for a user who sets a removed key; None for any other key."""
    found = find(key)
    if found is None:
        return None
    name, removed = found
    return f"`resilience.{name}`: there is no such key any more. {removed.instead}"


def without(policy: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """Convert the policy of a job that an earlier version started.

    Args:
        policy: Plain containers, with interpolations as text.
    Returns:
        (the policy, its keys whose value is ignored).
    """
    names: list[str] = []
    return _without(policy, "", names), names


def _without(group: Mapping[Any, Any], prefix: str, names: list[str]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for name, value in group.items():
        key = f"{prefix}{name}"
        gone = find(key)
        if gone is not None:
            if gone[1].new_name is not None:
                kept[gone[1].new_name] = value
            elif not gone[1].is_now_its_group:
                names.append(key)
            continue
        kept[name] = value
        if isinstance(value, Mapping) and value:
            inner = [f"{key}.{one}" for one in value]
            moved = [one for one in inner if (found := find(one)) and found[1].is_now_its_group]
            kept[name] = _without(value, f"{key}.", names)
            if moved:
                kept[name] = value[moved[0].rpartition(".")[2]]
            elif not kept[name]:
                del kept[name]
    return kept


def notify(names: list[str]) -> None:
    """Log the ignored keys of a job's stored policy, if there are any.

    `checks.*.threshold` matches the key of every check. An old policy has dozens of keys that no
    longer exist, so for many keys of one group the notice only gives their number.
    """
    groups: dict[str, set[str]] = {}
    for name in names:
        pattern = _pattern(name) or name
        groups.setdefault(pattern.rpartition(".")[0], set()).add(pattern)
    shown = [
        f"{len(keys)} keys of `resilience.{group}`"
        if len(keys) > _LISTED
        else ", ".join(f"`resilience.{key}`" for key in sorted(keys))
        for group, keys in groups.items()
    ]
    if shown:
        messages.warn(
            "This job was started by an earlier version of forge. Keys of its stored policy that no"
            f" longer exist are ignored: {', '.join(shown)}."
        )


_LISTED = 3
"""Number of removed keys of a group that are listed; for more the notice names the group."""
