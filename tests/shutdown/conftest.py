"""Jobs are forked."""

from forked import make_job, undisturbed

__all__ = ["make_job", "undisturbed"]
