"""File names in a checkpoint directory, other than `step_<N>` (`forge/filesystem/steps.py`)."""

LATEST = "latest"
"""A relative symlink to the newest checkpoint."""

FINAL = "final_"
"""`final_step_<N>` has the state at the end of main, if it differs from the state after step N.

No job resumes from it: the script's code after the last loop computed it from `step_<N>`.
"""


def files_of(rank: int) -> tuple[str, str]:
    """The files of one rank in a checkpoint (state, tensors); the manifest is for all ranks."""
    return f"state_rank{rank:05d}.json", f"tensors_rank{rank:05d}.safetensors"


STATE, TENSORS = files_of(0)
