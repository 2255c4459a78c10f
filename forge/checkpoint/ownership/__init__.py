"""The claim on a checkpoint directory: only one attempt at a time writes to it."""
