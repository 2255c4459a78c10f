"""A rank has died: what the others still have of the last boundary is saved by rank 0."""
