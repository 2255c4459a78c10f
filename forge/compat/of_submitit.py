"""Private parts of submitit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import submitit

SUBMIT_MODULE = "submitit.core._submit"
"""What `python -m` starts for a job in the folder that is its argument."""


def sbatch_text(executor: submitit.SlurmExecutor, command: str) -> str:
    """The batch script that submitit would submit, with its header, for a command.

    If it goes: see what `SlurmExecutor` writes its script with (`_make_sbatch_string` today).
    """
    return str(executor._make_submission_file_text(command, ""))


def slurm_parameters(executor: submitit.SlurmExecutor, generic: dict[str, Any]) -> dict[str, Any]:
    """Parameters of any executor (`mem_gb`, `name`, …) in the words of Slurm's.

    If it goes: see how `AutoExecutor.update_parameters` converts them.
    """
    return dict(executor._convert_parameters(generic))
