"""Which node of a job failed a health check: what the rank that saw it says before it leaves.

<job dir>/.forge/sick.json   of rank 0; `sick.json.1` is rank 1's

All ranks leave with the same exit code, and their nodes are healthy but for one. Standard library
only: the job's wrapper reads it, in the batch script.
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
class Sick:
    """A failed check."""

    node: str
    """As Slurm knows it; empty where the rank leaves, and its node is not to blame."""
    check: str
    """Name of the check; empty where nobody says."""
    text: str
    """What was found, for people."""
    action: str
    """What the policy makes of it: `refuse`, `exclude_node` or `halt`."""

    @property
    def reason(self) -> Reason:
        """Why the job ends, by this: what was halted is not started again."""
        return Reason.halted if self.action == "halt" else Reason.unhealthy


def write(job_dir: Path, found: Sick) -> None:
    """Say that this rank leaves since a check failed, as a rule on its node."""
    path = forge_dir(job_dir) / f"{FILE}{suffix()}"
    # Where the disk is full the wrapper goes by the exit codes: of the rank that left first.
    with contextlib.suppress(OSError):
        make_directory(path.parent)
        write_json(path, asdict(found))


def read(job_dir: Path, rank: int) -> Sick | None:
    """What a rank of the last attempt says; None: nothing, or nothing that makes sense.

    Raises:
        Untrusted: Where somebody else could have written it.
    """
    content = read_json(forge_dir(job_dir) / f"{FILE}{suffix(rank)}")
    if content is None or content.keys() != Sick.__annotations__.keys():
        return None
    return Sick(**{name: str(value) for name, value in content.items()})


def read_all(job_dir: Path, ranks: int) -> dict[int, Sick]:
    """What each of so many ranks says, by rank; raises as `read`."""
    found = ((rank, read(job_dir, rank)) for rank in range(ranks))
    return {rank: one for rank, one in found if one is not None}
