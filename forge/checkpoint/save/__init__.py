"""Writing a checkpoint: the copy of the state, and its bytes."""
