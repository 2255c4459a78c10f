"""Who may write to a checkpoint directory, and whose checkpoints are trusted."""
