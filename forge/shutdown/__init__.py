"""How a process shuts down: signals, callbacks, children, and an exit that does not hang."""
