"""The progress of a sweep, as its launcher shows it."""
