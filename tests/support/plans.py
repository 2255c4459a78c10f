"""Plans of jobs, for tests of what goes by them."""

from typing import Any

from forge.config.schema import RequeueConfig
from forge.jobdir.plan import JobPlan, RequeueLimits, SlurmPlan

LISTENS = {"TERM": "stop", "INT": "stop", "USR1": "requeue", "USR2": "requeue"}


def planned(*, ranks: int = 1, **changes: Any) -> JobPlan:
    """A plan of a job on a cluster; `changes` are fields of it."""
    fields: dict[str, Any] = {
        "overrides": [],
        "command": ["true"],
        "cwd": "/",
        "environment": {},
        "inode": [],
        "token": "none",
        "program": "train.py:main with config train",
        "composed": "",
        "main": None,
        "argv": ["train.py"],
        "orig_argv": ["python", "train.py"],
        "path": [],
        "has_whole_path": False,
        "checkpoint_dir": "checkpoints",
        "time_limit_s": 3600.0,
        "signal": "USR2",
        "warning_s": 30.0,
        "timeout_s": 10.0,
        "actions": LISTENS,
        "requeue": RequeueLimits.of(RequeueConfig()),
        "slurm": SlurmPlan(ranks=ranks, kill_wait_s=30.0, srun_args=[], start=["true"]),
    }
    return JobPlan(**(fields | changes))
