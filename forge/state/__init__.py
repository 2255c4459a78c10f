"""The objects of a run: their state captured, compared leaf by leaf, and restored."""
