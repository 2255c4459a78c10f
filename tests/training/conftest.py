"""Jobs are forked."""

from forked import make_job, stop_and_compare, undisturbed

__all__ = ["make_job", "stop_and_compare", "undisturbed"]
