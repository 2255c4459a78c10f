"""Loops over `run.steps`: where they are, and what runs at their boundaries."""
