"""Reading a checkpoint: verify it, then read into the live tensors if there are any."""
