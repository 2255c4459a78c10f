"""forge inside a Hydra app: its callback, the stored config, hints for overrides."""
