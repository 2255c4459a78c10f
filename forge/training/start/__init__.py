"""What entering a Run does: check, claim, find what to begin with."""
