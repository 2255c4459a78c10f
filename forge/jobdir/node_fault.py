"""The node of a job that failed a health check: written by the rank that saw it, before it exits.

<job dir>/.forge/sick.json   of rank 0; `sick.json.1` is rank 1's

All ranks exit with the same code, but only one node is sick. This module needs only the standard
library, since the job's wrapper in the batch script reads the file.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

from forge.errors import Reason
from forge.filesystem.files import make_directory
from forge.jobdir.job_files import forge_dir, read_json, suffix, write_json

FILE = "sick.json"


@dataclass(frozen=True)
class NodeFault:
    """A failed check."""

    node: str
    """Slurm's name of the node; empty if the rank exits but its node is healthy."""
    check: str
    """Name of the check; empty if it is not known."""
    text: str
    """The finding, for people."""
    action: str
    """The action in the policy: `refuse`, `exclude_node` or `halt`."""

    @property
    def reason(self) -> Reason:
        """Why the job ends; a job that was halted is not restarted."""
        return Reason.halted if self.action == "halt" else Reason.unhealthy


def write(job_dir: Path, found: NodeFault) -> None:
    """Record that this rank exits since a health check failed, usually on its node."""
    path = forge_dir(job_dir) / f"{FILE}{suffix()}"
    # If the disk is full, the wrapper uses the exit code of the rank that exited first.
    with contextlib.suppress(OSError):
        make_directory(path.parent)
        write_json(path, asdict(found))


def read(job_dir: Path, rank: int) -> NodeFault | None:
    """The record of a rank in the last attempt; None if it is missing or invalid.

    Raises:
        Untrusted: If another user could have written it.
    """
    content = read_json(forge_dir(job_dir) / f"{FILE}{suffix(rank)}")
    if content is None or content.keys() != NodeFault.__annotations__.keys():
        return None
    return NodeFault(**{name: str(value) for name, value in content.items()})


def read_all(job_dir: Path, ranks: int) -> dict[int, NodeFault]:
    """Rank -> its record, for all ranks that have one; raises as `read`."""
    found = ((rank, read(job_dir, rank)) for rank in range(ranks))
    return {rank: one for rank, one in found if one is not None}
