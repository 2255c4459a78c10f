"""The command `forge`."""
