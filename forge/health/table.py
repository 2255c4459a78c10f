"""The built-in health checks, in the order in which they are made."""

from __future__ import annotations

from forge.health import host
from forge.health.check import Check, Scope

CHECKS: tuple[Check, ...] = (Check("shm", host.shm, Scope.node, is_passive=True),)
"""Their names are the keys of `health.checks`; a check that meets the other ranks comes last."""
