"""The Slurm job of this process, and the checkpoint to resume from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forge import messages
from forge.jobdir.job_files import step_dirs
from forge.process.world import largest_count

__all__ = [
    "SLURMInfo",
    "get_slurm_info",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_job_info",
    "resolve_resume_path",
]


@dataclass(frozen=True)
class SLURMInfo:
    """The Slurm job of this process, from the variables that Slurm sets (sbatch(1))."""

    job_id: str
    job_name: str
    node_list: str
    num_nodes: int
    ntasks_per_node: int
    """The largest number, if nodes differ."""
    restart_count: int
    partition: str
    array_task_id: str | None = None
    num_restarts_by_forge: int = 0
    """Earlier starts counted by forge, including restarts on the same nodes."""

    @property
    def is_requeued(self) -> bool:
        """Whether the job ran before: Slurm requeued it, or forge restarted it."""
        return self.restart_count > 0 or self.num_restarts_by_forge > 0


def get_slurm_info() -> SLURMInfo | None:
    """Read the Slurm job from the environment.

    Returns:
        The job of this process, or None outside Slurm.
    """
    env = os.environ
    job_id = env.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    return SLURMInfo(
        job_id=job_id,
        job_name=env.get("SLURM_JOB_NAME", ""),
        node_list=env.get("SLURM_JOB_NODELIST", "") or env.get("SLURM_NODELIST", ""),
        num_nodes=largest_count(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES"), 1),
        ntasks_per_node=largest_count(
            env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE"), 1
        ),
        restart_count=largest_count(env.get("SLURM_RESTART_COUNT"), 0),
        partition=env.get("SLURM_JOB_PARTITION", ""),
        array_task_id=env.get("SLURM_ARRAY_TASK_ID") or None,
        num_restarts_by_forge=largest_count(env.get("FORGE_RESTART_COUNT"), 0),
    )


def is_slurm_job() -> bool:
    """Whether this process runs inside a Slurm job.

    Returns:
        Whether Slurm's environment variables are set.
    """
    return get_slurm_info() is not None


def is_slurm_requeue() -> bool:
    """Whether this Slurm job has been started before.

    Returns:
        True inside a Slurm job that ran before, else False.
    """
    info = get_slurm_info()
    return info is not None and info.is_requeued


def log_job_info() -> None:
    """Log the Slurm job of this process, or that there is none."""
    info = get_slurm_info()
    if info is None:
        messages.say("Not a Slurm job: SLURM_JOB_ID is not set")
        return
    array = f", array task {info.array_task_id}" if info.array_task_id else ""
    messages.say(
        f"Slurm job {info.job_id} ({info.job_name}{array}) on {info.num_nodes} node(s)"
        f" {info.node_list}, partition {info.partition}, {info.ntasks_per_node} task(s) per node,"
        f" restart {max(info.restart_count, info.num_restarts_by_forge)}"
    )


def resolve_resume_path(checkpoint_dir: Path | str) -> Path | None:
    """Find the checkpoint to resume from.

    Returns the target of the symlink `latest` if it is usable, else the `step_N` with the highest
    number. Directories without a readable manifest do not count, unless none has a manifest: then
    another tool saved them, and the highest number is returned.

    Args:
        checkpoint_dir: The directory that contains the `step_N`.
    Returns:
        The checkpoint's directory, or None if there is no checkpoint.
    Raises:
        CheckpointError: If a checkpoint has a newer format than this version of forge can read.
    """
    # Imported here: reading Slurm's environment does not need torch.
    from forge.checkpoint.format import manifest
    from forge.errors import DamagedCheckpoint

    directory = Path(checkpoint_dir)
    if not directory.is_dir():
        return None

    def is_committed(path: Path) -> bool:
        try:
            manifest.check_sizes(path, manifest.read(path))
        except DamagedCheckpoint:
            return False
        return True

    steps = [path for path in step_dirs(directory) if path.is_dir()]
    latest = directory / "latest"
    is_ours = any((path / manifest.NAME).exists() for path in steps)
    usable = [path for path in steps if is_committed(path)] if is_ours else steps
    if latest.is_symlink() and latest.is_dir():
        target = latest.resolve()
        if is_committed(target) or not is_ours:
            return target
    return usable[0] if usable else None
