"""The names in a checkpoint directory, beside `step_<N>` (`forge/filesystem/steps.py`)."""

LATEST = "latest"
"""A relative symlink to the newest."""

FINAL = "final_"
"""Before `step_<N>`: the state of a finished training, if it differs from that of step N.

Nothing resumes from it: the work after the last loop has made it from `step_<N>`.
"""


def files_of(rank: int) -> tuple[str, str]:
    """The files of one rank in a checkpoint, beside its manifest: state, tensors."""
    return f"state_rank{rank:05d}.json", f"tensors_rank{rank:05d}.safetensors"


STATE, TENSORS = files_of(0)
