"""forge: training jobs that survive their cluster.

Names load on first use, so that `import forge` costs a few milliseconds and imports neither
torch, nor submitit, nor Hydra.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_imported_in = os.sep
with contextlib.suppress(FileNotFoundError):  # the directory was removed
    _imported_in = os.getcwd()
_HOME_OF = {
    "ConfigError": "forge.errors",
    "CheckpointError": "forge.errors",
    "DamagedCheckpoint": "forge.errors",
    "DirectoryInUse": "forge.errors",
    "Exit": "forge.errors",
    "ExitCode": "forge.errors",
    "ForgeError": "forge.errors",
    "StateMismatch": "forge.errors",
    "Checkpointable": "forge.checkpointable",
    "Policy": "forge.config",
    "Run": "forge.run",
    "load": "forge.checkpoint.inspection",
    "on_stop": "forge.stopping",
    "shielded": "forge.stopping",
}
_MODULES = ("checkpoint", "config", "data", "errors", "ledger", "resilience")

__all__ = [
    "CheckpointError",
    "Checkpointable",
    "ConfigError",
    "DamagedCheckpoint",
    "DirectoryInUse",
    "Exit",
    "ExitCode",
    "ForgeError",
    "Policy",
    "Run",
    "StateMismatch",
    "__version__",
    "checkpoint",
    "config",
    "data",
    "errors",
    "ledger",
    "load",
    "on_stop",
    "resilience",
    "shielded",
]

if TYPE_CHECKING:
    from forge import checkpoint, config, data, errors, ledger, resilience
    from forge.checkpoint.inspection import load
    from forge.checkpointable import Checkpointable
    from forge.config import Policy
    from forge.errors import (
        CheckpointError,
        ConfigError,
        DamagedCheckpoint,
        DirectoryInUse,
        Exit,
        ExitCode,
        ForgeError,
        StateMismatch,
    )
    from forge.run import Run
    from forge.stopping import on_stop, shielded


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"forge.{name}")
    else:
        raise AttributeError(f"module 'forge' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
