"""The options of `hydra/launcher=local`, and the cores and GPUs of this machine."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from forge.errors import ConfigError
from forge.launch import option_check


@dataclass
class LocalOptions:
    """The options in conf/hydra/launcher/local.yaml."""

    n_jobs: int | None = None
    tasks_per_job: int = 1
    cpus_per_job: int = 1
    gpus_per_job: int | None = None
    timeout_min: float | None = None
    snapshot: bool = False
    progress: str = "auto"

    @property
    def time_limit_s(self) -> float | None:
        """Time limit of one start of a job, in seconds."""
        return None if self.timeout_min is None else 60.0 * self.timeout_min


def cores() -> int:
    """CPU cores available to this process, limited by the quota of its cgroup."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2, no quota
    return max(count, 1)


def gpus() -> list[str]:
    """The GPUs available to jobs, as names for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA uses the names before the first invalid one, such as `-1` or `NoDevFiles`.
        names = [name.strip() for name in visible.split(",")]
        return list(dict.fromkeys(itertools.takewhile(_is_device, names)))
    if shutil.which("nvidia-smi") is None:
        return []
    # By UUID: nvidia-smi and CUDA can number the GPUs differently.
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [name for name in listing.stdout.split() if _is_device(name)]


def _is_device(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


@dataclass(frozen=True)
class Slots:
    """How many jobs run at a time, and the GPUs of each slot."""

    gpus: list[list[str]]
    """The GPUs of each slot; empty lists if jobs get no GPUs."""
    has_gpus: bool
    """Whether the machine has GPUs: then they must be hidden from jobs that get none."""

    @property
    def count(self) -> int:
        """Jobs at a time."""
        return len(self.gpus)


def options(given: dict[str, Any]) -> LocalOptions:
    """Check the launcher's options.

    Raises:
        ConfigError: With every problem found.
    """
    least = {
        "n_jobs": 1,
        "tasks_per_job": 1,
        "cpus_per_job": 1,
        "gpus_per_job": 0,
    }
    found, problems = option_check.read(LocalOptions, given, least)
    if problems:
        raise ConfigError(
            option_check.sentences(given, problems, "hydra.launcher"),
            "The launcher's configuration",
        )
    return found


def slots(chosen: LocalOptions) -> Slots:
    """Divide the machine into slots.

    Raises:
        ConfigError: If the jobs request more GPUs than there are.
    """
    devices = gpus()
    tasks = chosen.tasks_per_job
    each = chosen.gpus_per_job if chosen.gpus_per_job is not None else tasks * bool(devices)
    if each > len(devices):
        seen = f"{len(devices)} visible here ({', '.join(devices) or 'nvidia-smi lists none'})"
        raise ConfigError(
            [f"`hydra.launcher.gpus_per_job={each}`: {seen}."], "The launcher's configuration"
        )
    if 0 < each < tasks:
        problem = (
            f"`hydra.launcher.gpus_per_job={each}` is less than"
            f" `hydra.launcher.tasks_per_job={tasks}`, so tasks would share a GPU. Set"
            f" gpus_per_job to {tasks}, or to 0 for jobs without a GPU."
        )
        raise ConfigError([problem], "The launcher's configuration")
    by_gpus = len(devices) // each if each else None
    count = chosen.n_jobs
    if count is None:
        by_cores = max(cores() // max(chosen.cpus_per_job, tasks), 1)
        count = by_cores if by_gpus is None else min(by_cores, by_gpus)
    elif by_gpus is not None and count > by_gpus:
        raise ConfigError(
            [
                f"`hydra.launcher.n_jobs={count}`: with `hydra.launcher.gpus_per_job={each}` the"
                f" {len(devices)} GPUs allow {by_gpus} jobs at a time. Lower one of the two."
            ],
            "The launcher's configuration",
        )
    return Slots([devices[i * each : (i + 1) * each] for i in range(count)], bool(devices))
