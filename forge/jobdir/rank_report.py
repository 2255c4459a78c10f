"""How the task of a rank ended: written by its supervisor, read by the job's wrapper.

<job dir>/.forge/report.json   of rank 0; `report.json.1` is rank 1's

Standard library only: the wrapper in the batch script reads the file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge.jobdir.job_files import REPORT, forge_dir, read_json, suffix, write_json


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The content of the file."""

    code: int
    """The task's exit code, or -N if signal N killed it."""
    is_held: bool = False
    """Whether the supervisor had to kill the task, which had not exited by its deadline."""
    time: float = 0.0
    """Unix time of the task's end: it shows which rank ended first."""
    node: str = ""
    """Slurm's name of the node; empty on one machine."""
    stops: list[str] = field(default_factory=list)
    """For a command: the signals that asked it to stop, each once."""
    is_done: bool = False
    """For a command: whether `exec.done_file` exists."""
    oom_kills: int = 0
    """Processes that the kernel's OOM killer killed meanwhile, by the count of the cgroup."""
    memory_bytes: int | None = None
    """Memory that the task could use at most; None if it is not known."""
    section: str = ""
    """The section of the task's last heartbeat, such as `save`; empty if there was none."""

    def write(self, path: Path) -> None:
        """Replace the file. Raises OSError if it cannot be written."""
        write_json(path, asdict(self))


def path_of(job_dir: Path, rank: int) -> Path:
    """The file of a rank."""
    return forge_dir(job_dir) / f"{REPORT}{suffix(rank)}"


def read(job_dir: Path, rank: int) -> RankReport | None:
    """The report of a rank in the last attempt; None if there is none.

    Raises:
        Untrusted: If another user could have written it.
    """
    content = read_json(path_of(job_dir, rank)) or {}
    known = {name: content[name] for name in RankReport.__annotations__ if name in content}
    return RankReport(**known) if "code" in known else None


def read_all(job_dir: Path, ranks: int) -> list[RankReport | None]:
    """The report of each rank."""
    return [read(job_dir, rank) for rank in range(ranks)]
