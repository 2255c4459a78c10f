"""Finds the installed package: `lightning`, or `pytorch_lightning`, which has the same code."""

from __future__ import annotations

import sys
from importlib import import_module, metadata, util
from typing import Any

OLDEST = (2, 5)
REFUSED = ("2.6.2", "2.6.3")
_INSTALL = "pip install 'hydra-forge[lightning]'"


def _name() -> str:
    """The package that the script uses; `lightning` also brings the other one."""
    has_other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    if util.find_spec("lightning") is not None and not has_other:
        return "lightning.pytorch"
    if util.find_spec("pytorch_lightning") is not None:
        return "pytorch_lightning"
    raise ImportError(
        "forge.integrations.lightning needs Lightning, which is not installed:"
        f" {_INSTALL}, or pip install pytorch_lightning"
    )


def problem_of(version: str) -> str:
    """Why this version of Lightning cannot be used; empty if it can."""
    if version in REFUSED:
        return f"never use Lightning {version}: install another release, {_INSTALL}"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        return f"expected Lightning 2.5 or newer, found {version}: {_INSTALL}"
    return ""


NAME = _name()
"""The package's module with `Trainer` and `Callback`."""

if _problem := problem_of(metadata.version(NAME.partition(".")[0].replace("_", "-"))):
    raise ImportError(f"forge.integrations.lightning: {_problem}")

pytorch: Any = import_module(NAME)
"""`lightning.pytorch`, or `pytorch_lightning`."""
CombinedLoader: Any = import_module(f"{NAME}.utilities.combined_loader").CombinedLoader
