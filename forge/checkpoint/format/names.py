"""The names in a checkpoint directory, beside `step_<N>` (`forge/filesystem/steps.py`)."""

LATEST = "latest"
"""A relative symlink to the newest."""

STATE, TENSORS = "state_rank00000.json", "tensors_rank00000.safetensors"
"""The files of a checkpoint, beside its manifest."""
