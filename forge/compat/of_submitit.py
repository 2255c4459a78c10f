"""Private parts of submitit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import submitit

SUBMIT_MODULE = "submitit.core._submit"
"""The module that `python -m` runs for a submitit job; its argument is the job's folder."""


def sbatch_text(executor: submitit.SlurmExecutor, command: str) -> str:
    """The batch script that submitit would submit for a command, with its header.

    If it goes: see how `SlurmExecutor` writes its script (today with `_make_sbatch_string`).
    """
    return str(executor._make_submission_file_text(command, ""))


def slurm_parameters(executor: submitit.SlurmExecutor, generic: dict[str, Any]) -> dict[str, Any]:
    """Convert generic executor parameters (`mem_gb`, `name`, …) to those of the Slurm executor.

    If it goes: see how `AutoExecutor.update_parameters` converts them.
    """
    return dict(executor._convert_parameters(generic))
