"""The descendants of this process, what it is doing itself, and how much time is left."""
