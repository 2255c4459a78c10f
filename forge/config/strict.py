"""What the preset `strict` makes of a failed health check: others log it beforehand.

The preset itself is `conf/resilience/strict.yaml`; a test holds the two equal.
"""

from __future__ import annotations

from forge.config.schema import CheckAction

_BY_ACTION = {
    CheckAction.refuse: ("disk",),
    CheckAction.halt: ("room", "inodes", "collective"),
    CheckAction.warn: ("throttle", "temperature"),
    CheckAction.exclude_node: (
        "gpu",
        "gpu_memory",
        "ecc",
        "row_remap",
        "retired_pages",
        "recovery_action",
        "clocks",
        "pcie",
        "shared_directory",
        "shm",
        "memory",
        "clock_skew",
        "processes",
        "straggler",
    ),
}
STRICT = {name: action for action, names in _BY_ACTION.items() for name in names}
"""Name of a built-in check -> its action."""
