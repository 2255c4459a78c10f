"""The keys of `resilience.slurm`: sbatch options that can differ between jobs.

They are keys of `hydra/launcher=slurm` (`forge/launch/slurm/slurm_options.py`; a test compares the
two), which checks their values, because a policy is also read on machines without the launcher.
"""

from __future__ import annotations

PER_JOB = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"),
    *("name", "stderr_to_stdout", "partition", "qos", "comment", "constraint", "exclude", "gres"),
    *("cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu", "account"),
    *("additional_parameters", "setup", "srun_args", "python", "teardown", "nodelist"),
    "dependency",
)
"""In the order of the launcher's dataclass."""
OF_THE_SWEEP = {
    name: f"Set `hydra.launcher.{name}`."
    for name in (
        *("submitit_folder", "array_parallelism", "wait", "dry_run", "max_alike", "stagger_s"),
        *("snapshot", "progress", "n_jobs"),
    )
} | {
    "signal_delay_s": "Set `resilience.signal.warning_s`.",
    "max_num_timeout": "Set `resilience.requeue.max_timeouts`.",
    "use_srun": "Remove it: forge always starts tasks with srun.",
}
"""Options that all jobs of a sweep share -> what to do instead."""


def refused(key: str) -> str | None:
    """The error for an option of the whole sweep that is set for one job; None for other keys."""
    group, _, name = key.rpartition(".")
    if group != "slurm" or name not in OF_THE_SWEEP:
        return None
    what = f"`resilience.{key}`: is an option of the whole sweep, not of one job."
    return f"{what} {OF_THE_SWEEP[name]}"
