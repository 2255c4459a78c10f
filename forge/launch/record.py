"""The last launch of a sweep: the launcher and its options, for `forge resume`.

<sweep dir>/.forge/launch.json
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import ConfigError
from forge.filesystem.files import read_trusted, write_atomically
from forge.jobdir.job_files import forge_dir

FILE = "launch.json"


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch, as it was recorded before its jobs were started."""

    launcher: str
    """`local` or `slurm`."""
    options: dict[str, Any]
    """The launcher's options."""
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Number of a job -> its own options (`resilience.slurm`)."""
    path: str = ""
    """The sweep's directory then: it can have been moved since."""
    time: float = field(default_factory=time.time)
    """Unix time."""

    def write(self, sweep_dir: Path) -> None:
        """Record the launch; the options of jobs of earlier batches stay."""
        before = _read(sweep_dir)
        own = (before.get("own") or {}) | self.own
        content = asdict(self) | {"own": own, "path": str(sweep_dir)}
        write_atomically(forge_dir(sweep_dir) / FILE, json.dumps(content) + "\n")


def read(sweep_dir: Path) -> LaunchRecord:
    """The last launch of the sweep in a directory.

    Raises:
        ConfigError: If none is recorded, or it cannot be used.
        Untrusted: If another user could have written it.
    """
    try:
        return LaunchRecord(**_read(sweep_dir))
    except TypeError as error:
        path = forge_dir(sweep_dir) / FILE
        raise ConfigError(
            [
                f"{path} is missing or of another version of forge ({error}). Resume the sweep by"
                f" the command that started it: `sh {forge_dir(sweep_dir)}/resume.sh`"
            ],
            "The sweep",
        ) from error


def _read(sweep_dir: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_trusted(forge_dir(sweep_dir) / FILE))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
