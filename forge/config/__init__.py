"""The resilience policy: typed keys, their defaults, and the rules between them."""

from forge.config.loading import load
from forge.config.schema import Policy

__all__ = ["Policy", "load"]
