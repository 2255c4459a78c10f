"""Makes PyTorch training jobs survive their cluster, and end with the bits of uninterrupted runs.

Example::

    import forge

    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for step, batch in run.steps(1000, loader):
            loss = loss_fn(model, batch)
            loss.backward()
            run.update(loss, optimizer)

`forge.Run` saves at a signal, resumes from the newest good checkpoint, and skips or rolls back
updates with NaN. Without Hydra the first argument is a dict, for example
`{"checkpoint": {"dir": "checkpoints"}}`, or is left out. `help(forge.Run)` describes it.

Names are imported on first use: `import forge` takes a few milliseconds and does not import torch,
submitit or Hydra.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import forge.jobdir  # noqa: F401 - records where this process was started
from forge._version import __version__

if sys.platform == "win32":
    raise ImportError(
        "forge needs POSIX signals and file locks, which Windows lacks. Use Linux, macOS or WSL."
    )

_HOME_OF = {
    "ConfigError": "forge.errors",
    "CheckpointError": "forge.errors",
    "DamagedCheckpoint": "forge.errors",
    "DirectoryInUse": "forge.errors",
    "Exit": "forge.errors",
    "ExitCode": "forge.errors",
    "ForgeError": "forge.errors",
    "StateMismatch": "forge.errors",
    "Checkpointable": "forge.submitit.checkpointable",
    "Policy": "forge.config.schema",
    "Run": "forge.training.run",
    "block_signals": "forge.shutdown.stopping",
    "load": "forge.checkpoint.inspection",
    "sweep": "forge.sweeps.sweep",
    "on_stop": "forge.shutdown.stopping",
}
_MODULES = {
    "checkpoint": "forge.checkpoint",
    "config": "forge.config",
    "data": "forge.data",
    "distributed": "forge.group.distributed",
    "errors": "forge.errors",
    "ledger": "forge.jobdir.ledger",
    "loggers": "forge.loggers",
    "resilience": "forge.resilience",
}

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
    "block_signals",
    "checkpoint",
    "config",
    "data",
    "distributed",
    "errors",
    "ledger",
    "load",
    "loggers",
    "on_stop",
    "resilience",
    "sweep",
]

if TYPE_CHECKING:
    from forge import checkpoint, config, data, errors, loggers, resilience
    from forge.checkpoint.inspection import load
    from forge.config.schema import Policy
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
    from forge.group import distributed
    from forge.jobdir import ledger
    from forge.shutdown.stopping import block_signals, on_stop
    from forge.submitit.checkpointable import Checkpointable
    from forge.sweeps.sweep import sweep
    from forge.training.run import Run


def _requeuer(policy: Any, job: Any) -> Any:
    """The requeuer of this process's job; outside Slurm nothing of Slurm's part is imported."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return importlib.import_module("forge.slurm.batch_job").of_run(policy, job)


def _load(name: str) -> Any:
    if name in _HOME_OF:
        if name == "Run":  # training code does not know Slurm: hand it the function that requeues
            importlib.import_module("forge.shutdown.stopping").offer_requeuer(_requeuer)
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        import difflib

        near = difflib.get_close_matches(name.lower(), [one.lower() for one in __all__], 1)
        meant = [one for one in __all__ if [one.lower()] == near]
        hint = f". Did you mean forge.{meant[0]}?" if meant else ""
        raise AttributeError(f"module 'forge' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker would accept any name, `forge.Runn` as well
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
