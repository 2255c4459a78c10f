"""Reading a checkpoint: verified, and into live tensors where there are such."""
