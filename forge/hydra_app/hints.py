"""Hints for overrides of `resilience` that Hydra refuses.

Hydra reports such a key before any code of ours sees the config, so the hint comes after its
message, as the process ends. Only a command line that names `resilience` arms it.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Iterable

from forge import messages

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
    from forge.config import removed, slurm_keys
    from forge.config.conversion import group_problem, known_keys, nearest_key, signal_name
    from forge.config.schema import SIGNALS

    known = known_keys()
    unknown = [key for key in keys if key not in known]
    if not unknown:
        return [
            "if your config has no `resilience` yet, add a preset to its defaults list (`defaults:"
            " [resilience: default, _self_]`), or add `+resilience=default` to this command"
        ]
    found = []
    for key in unknown:
        group, _, name = key.rpartition(".")
        near = nearest_key(key)
        refused = removed.problem(key) or slurm_keys.refused(key)
        if refused is not None:
            found.append(refused)
        elif problem := group_problem(key):
            found.append(f"`resilience.{key}`: {problem}")
        elif group == "signal.actions" and signal_name(name) in SIGNALS:
            found.append(f"write `resilience.{group}.{signal_name(name)}=…`")
        elif near:
            found.append(
                f"`resilience.{key}` is not a key of forge's policy. Did you mean"
                f" `resilience.{near}`?"
            )
        # What resembles none of our keys may be the app's own, and Hydra said what is wrong.
    return found


def _print() -> None:
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        return  # a job began, in an app whose `resilience` is not ours
    for hint in hints_for(_pending) if _pending else ():
        sys.stderr.write(f"forge: {messages.escape(hint)}\n")
