"""Building blocks for loops in which `forge.Run` cannot be used.

`signal_handler` handles stop signals, `health` detects NaNs and bad devices, `elastic` reads the
Slurm job from the environment. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "ShutdownHandler": "signal_handler",
    "NaNDetector": "health",
    "NaNState": "health",
    "check_gpu_health": "health",
    "check_nccl_health": "health",
    "SLURMInfo": "elastic",
    "get_slurm_info": "elastic",
    "is_slurm_job": "elastic",
    "is_slurm_requeue": "elastic",
    "log_job_info": "elastic",
    "resolve_resume_path": "elastic",
}
_MODULES = ("elastic", "health", "signal_handler")

__all__ = [
    "NaNDetector",
    "NaNState",
    "SLURMInfo",
    "ShutdownHandler",
    "check_gpu_health",
    "check_nccl_health",
    "elastic",
    "get_slurm_info",
    "health",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_job_info",
    "resolve_resume_path",
    "signal_handler",
]

if TYPE_CHECKING:
    from forge.resilience import elastic, health, signal_handler
    from forge.resilience.elastic import (
        SLURMInfo,
        get_slurm_info,
        is_slurm_job,
        is_slurm_requeue,
        log_job_info,
        resolve_resume_path,
    )
    from forge.resilience.health import NaNDetector, NaNState, check_gpu_health, check_nccl_health
    from forge.resilience.signal_handler import ShutdownHandler


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name, name)
    if home not in _MODULES:
        raise AttributeError(f"module 'forge.resilience' has no attribute {name!r}")
    module = importlib.import_module(f"forge.resilience.{home}")
    return module if name == home else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
