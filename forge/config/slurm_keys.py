"""The names below `resilience.slurm`: options of sbatch that a job can have for itself.

They are those of `hydra/launcher=slurm` (`forge/launch/slurm/slurm_options.py`, held equal by a
test), which checks their values: the launcher is not installed wherever a policy is read.
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
OF_LOCAL_JOBS = ("n_jobs", "tasks_per_job", "cpus_per_job", "gpus_per_job")
"""Options that only `hydra/launcher=local` has (`LocalOptions`, held equal by a test)."""
OF_THE_SWEEP = {
    name: f"hydra.launcher.{name}"
    for name in ("submitit_folder", "array_parallelism", "wait", "dry_run", "progress", "n_jobs")
} | {
    "signal_delay_s": "resilience.signal.warning_s",
    "max_num_timeout": "resilience.requeue.max_timeouts",
    "use_srun": "nothing: forge always starts tasks by srun",
}
"""Options that all jobs of a sweep share -> what to set instead."""


def refused(key: str) -> str | None:
    """What to tell a user who gives one job an option of the whole sweep; None for other keys."""
    group, _, name = key.rpartition(".")
    if group != "slurm" or name not in OF_THE_SWEEP:
        return None
    instead = OF_THE_SWEEP[name]
    remedy = f"`{instead}`" if "." in instead else instead
    return f"`resilience.{key}`: is an option of the whole sweep, not of one job. Set {remedy}."
