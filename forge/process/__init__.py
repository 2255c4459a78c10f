"""The processes below this one, what it is doing itself, and how much time is left."""
