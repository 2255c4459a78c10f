"""Jobs are forked."""

from forked import make_job, runner, stop_and_compare, undisturbed

__all__ = ["make_job", "runner", "stop_and_compare", "undisturbed"]
