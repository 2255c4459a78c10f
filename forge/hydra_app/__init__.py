"""What forge does inside a Hydra app: its callback, the frozen config, hints for overrides."""
