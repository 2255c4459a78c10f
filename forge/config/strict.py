"""What the preset `strict` makes of a failed health check: others log it beforehand.

The preset itself is `conf/resilience/strict.yaml`; a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import fields

from forge.config.schema import CheckAction, ChecksConfig

_OTHERS = {
    CheckAction.refuse: ("disk",),
    CheckAction.halt: ("room", "inodes", "collective"),
}
STRICT = {one.name: CheckAction.exclude_node for one in fields(ChecksConfig)} | {
    name: action for action, names in _OTHERS.items() for name in names
}
"""Name of a built-in check -> its action."""
