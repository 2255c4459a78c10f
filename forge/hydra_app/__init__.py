"""What forge does inside a Hydra app: its callback, and the frozen config."""
