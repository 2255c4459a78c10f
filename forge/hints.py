"""Hints for overrides of `resilience` that Hydra refuses.

Hydra reports such a key before any code of ours sees the config, so the hint comes after its
message, as the process ends. Only a command line that names `resilience` arms it.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Iterable

_OVERRIDE = re.compile(r"[+~]{0,2}resilience\.([\w.]+)=")

_pending: list[str] = []


def arm(arguments: Iterable[str]) -> None:
    """Prepare hints for the overrides of `resilience` in a command line."""
    keys = [match[1] for match in map(_OVERRIDE.match, arguments) if match]
    if keys and not _pending:
        _pending.extend(keys)
        atexit.register(_print)


def composition_succeeded() -> None:
    """Hydra took every override: no hint is needed."""
    _pending.clear()


def hints_for(keys: Iterable[str]) -> list[str]:
    """One sentence per key that Hydra may have refused."""
    from forge.rules import known_keys, nearest_key

    found = []
    for key in keys:
        if key not in known_keys() and not key.startswith("signal.actions."):
            near = nearest_key(key)
            found.append(
                f"`resilience.{key}` is no key of the policy."
                + (f" Did you mean `resilience.{near}`?" if near else "")
            )
    return found or [
        "if your config has no `resilience` yet, add a preset to its defaults list"
        " (`defaults: [resilience: default, _self_]`), or add `+resilience=default` to this command"
    ]


def _print() -> None:
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig in type(HydraConfig)._instances:
        return  # a job began, in an app whose `resilience` is not ours
    for hint in hints_for(_pending) if _pending else ():
        sys.stderr.write(f"forge: {hint}\n")
