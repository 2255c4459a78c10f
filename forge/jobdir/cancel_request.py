"""A request to cancel a job, left in its directory by `forge cancel`.

<job dir>/.forge/cancel.json   who has asked, when, and whether the job can save first

The job's wrapper looks for it while it runs and before each attempt, on whatever machine that is.
The next launch of the job removes the file.
"""

from __future__ import annotations

import getpass
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge.filesystem.files import make_directory
from forge.jobdir.job_files import forge_dir, read_json, write_json

FILE = "cancel.json"


@dataclass(frozen=True)
class CancelRequest:
    """A request to end a job, which then does not start again by itself."""

    is_now: bool = False
    """Whether to kill the job without a save."""
    by: str = field(default_factory=lambda: f"{_user()}@{os.uname().nodename}")
    time: float = field(default_factory=time.time)
    """Unix time."""

    def write(self, job_dir: Path) -> None:
        """Leave the request in a job's directory.

        Raises:
            OSError: If it cannot be written.
        """
        make_directory(forge_dir(job_dir))
        write_json(forge_dir(job_dir) / FILE, asdict(self), is_synced=True)


def read(job_dir: Path) -> CancelRequest | None:
    """The request in a job's directory, or None; one that is damaged asks for a save first.

    Raises:
        Untrusted: If another user could have written it.
    """
    path = forge_dir(job_dir) / FILE
    if not os.path.exists(path):  # Path.exists raises if a network disk is away for a moment
        return None
    content = read_json(path) or {}
    return CancelRequest(content.get("is_now") is True, str(content.get("by", "")))


def clear(job_dir: Path) -> None:
    """Remove the request, as the job is launched again."""
    (forge_dir(job_dir) / FILE).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without this user
        return str(os.getuid())
