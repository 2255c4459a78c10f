"""Finds the installed package: `lightning`, or `pytorch_lightning`, which has the same code."""

from __future__ import annotations

import sys
from importlib import import_module, metadata, util
from typing import Any

from forge.integrations.refusal import missing

OLDEST = (2, 5)
REFUSED = ("2.6.2", "2.6.3")
_PACKAGE = "'lightning>=2.5,!=2.6.2,!=2.6.3'"


def name_of(imported: Any, is_installed: Any) -> str:
    """The module that the script uses; `pip install lightning` installs both.

    Args:
        imported: Names of the modules that are imported.
        is_installed: Tells of the name of a package whether it is installed.
    """
    has_other = "pytorch_lightning" in imported and "lightning.pytorch" not in imported
    is_other = has_other or not is_installed("lightning")
    return (
        "pytorch_lightning"
        if is_other and is_installed("pytorch_lightning")
        else "lightning.pytorch"
    )


def problem_of(version: str) -> str:
    """Why this version of Lightning cannot be used; empty if it can."""
    if version in REFUSED:
        return f"never use Lightning {version}: pip install {_PACKAGE}"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        return f"expected Lightning 2.5 or newer, found {version}: pip install {_PACKAGE}"
    return ""


NAME = name_of(sys.modules, util.find_spec)
"""The package's module with `Trainer` and `Callback`."""
try:
    pytorch: Any = import_module(NAME)
    """`lightning.pytorch`, or `pytorch_lightning`."""
    CombinedLoader: Any = import_module(f"{NAME}.utilities.combined_loader").CombinedLoader
except ImportError as error:
    raise missing("lightning", _PACKAGE, error) from error

if _problem := problem_of(metadata.version(NAME.partition(".")[0].replace("_", "-"))):
    raise ImportError(f"forge.integrations.lightning: {_problem}")
