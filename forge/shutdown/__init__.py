"""How a process leaves: callbacks, children, and an exit that does not hang."""
