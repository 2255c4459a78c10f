"""Entering a Run: check the config, claim the directory, load a checkpoint."""
