"""Hints for overrides of `resilience` that Hydra refuses.

Hydra reports such a key before forge sees the config, so the hint is printed after Hydra's message,
when the process ends. Only a command line with a key of `resilience` prepares a hint.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Iterable

from forge import messages

_OVERRIDE = re.compile(r"[+~]{0,2}resilience\.([\w.]+)=")

ADD_PRESET = (
    "add a preset to its defaults list (`defaults: [resilience: default, _self_]`), or add"
    " `+resilience=default` to this command"
)
"""What to do if a config has no `resilience`."""

pending_keys: list[str] = []
"""Overrides below `resilience` that need a preset which the config does not have."""
_arguments: list[str] = []


def arm(arguments: Iterable[str]) -> None:
    """Prepare hints for the overrides in a command line."""
    words = list(arguments)
    _arguments[:] = words
    keys = [match[1] for match in map(_OVERRIDE.match, words) if match]
    if keys and not pending_keys:
        pending_keys.extend(keys)
        atexit.register(_print)


def composition_succeeded() -> None:
    """Hydra accepted all overrides: print no hint."""
    pending_keys.clear()


def hints_for(keys: Iterable[str]) -> list[str]:
    """One sentence for each key that Hydra possibly refused."""
    from forge.config.conversion import known_keys, signal_name
    from forge.config.schema import SIGNALS
    from forge.config.unknown import group_problem, refused, suggestion

    known = known_keys()
    unknown = [key for key in keys if key not in known]
    if not unknown:
        if any(word.lstrip("+").startswith("resilience=") for word in _arguments):
            return []  # Hydra refuses something else
        return [f"if your config has no `resilience` yet, {ADD_PRESET}"]
    found = []
    for key in unknown:
        group, _, name = key.rpartition(".")
        if refusal := refused(key):
            found.append(refusal)
        elif problem := group_problem(key, known):
            found.append(f"`resilience.{key}`: {problem}")
        elif group == "signal.actions" and signal_name(name) in SIGNALS:
            found.append(f"write `resilience.{group}.{signal_name(name)}=…`")
        elif instead := suggestion(key, known):
            found.append(f"`resilience.{key}` is not a key of forge's policy. {instead}")
        # A key unlike any of ours can be the app's own, and Hydra has reported it.
    return found


def _print() -> None:
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized() or not pending_keys:
        return  # a job began, in an app with its own `resilience` group, or all were accepted
    for hint in hints_for(pending_keys):
        sys.stderr.write(f"forge: {messages.escape(hint)}\n")
