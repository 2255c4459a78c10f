"""Who may write to a checkpoint directory: one attempt at a time."""
