"""The last launch of a sweep: the launcher and its options, for `forge resume`.

<sweep dir>/.forge/launch.json
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError
from forge.filesystem.files import read_trusted, write_atomically
from forge.jobdir.job_files import LAUNCH, forge_dir

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from forge.launch.snapshot import CodeSnapshot


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch, as it was recorded before its jobs were started."""

    launcher: str
    """`local` or `slurm`."""
    options: dict[str, Any]
    """The launcher's options."""
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Number of a job -> its own options (`resilience.slurm`)."""
    snapshot: str = ""
    """The copy of the code from which the jobs run; empty: they run from the code itself."""
    path: str = ""
    """The sweep's directory then: it can have been moved since."""
    time: float = field(default_factory=time.time)
    """Unix time."""

    @classmethod
    def of(
        cls,
        launcher: str,
        options: DataclassInstance,
        copy: CodeSnapshot | None,
        own: dict[str, dict[str, Any]] | None = None,
    ) -> LaunchRecord:
        """The record of a launch that begins now."""
        place = "" if copy is None else str(copy.copy)
        return cls(launcher=launcher, options=asdict(options), own=own or {}, snapshot=place)

    def write(self, sweep_dir: Path) -> None:
        """Record the launch; the options of jobs of earlier batches stay."""
        before = _read(sweep_dir)
        own = (before.get("own") or {}) | self.own
        content = asdict(self) | {"own": own, "path": str(sweep_dir)}
        write_atomically(forge_dir(sweep_dir) / LAUNCH, json.dumps(content) + "\n")


def read(sweep_dir: Path) -> LaunchRecord:
    """The last launch of the sweep in a directory.

    Raises:
        ConfigError: If none is recorded, or it cannot be used.
        Untrusted: If another user could have written it.
    """
    try:
        return LaunchRecord(**_read(sweep_dir))
    except TypeError as error:
        path = forge_dir(sweep_dir) / LAUNCH
        raise ConfigError(
            [
                f"{path} is missing or of another version of forge ({error}). Resume the sweep by"
                f" the command that started it: `sh {forge_dir(sweep_dir)}/resume.sh`"
            ],
            "The sweep",
        ) from error


def _read(sweep_dir: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_trusted(forge_dir(sweep_dir) / LAUNCH))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
