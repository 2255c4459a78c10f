"""Cooperative shutdown: a signal sets a deadline, and a flag that a loop reads after each step."""

from forge.shutdown.signal_handler import ShutdownHandler

__all__ = ["ShutdownHandler"]
