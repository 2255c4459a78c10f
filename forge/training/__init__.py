"""The user's loop: the Run, its step boundaries, saves, and the NaN policy."""
