"""Cooperative shutdown: a signal starts a deadline and sets a flag to read after each step."""

from forge.shutdown.signal_handler import ShutdownHandler

__all__ = ["ShutdownHandler"]
