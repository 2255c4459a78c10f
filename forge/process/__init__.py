"""The processes below this one, and how much time is left."""
