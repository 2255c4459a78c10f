"""Loops over `run.steps` and `run.epochs`, and what runs at their step boundaries."""
