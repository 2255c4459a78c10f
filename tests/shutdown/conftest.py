"""Jobs are forked; a handler is gone after its test."""

import pytest
from forked import make_job, undisturbed

from forge.shutdown.signal_handler import ShutdownHandler

__all__ = ["make_job", "undisturbed"]


@pytest.fixture
def handler():
    """Registered, without a forced exit, and gone after the test."""
    one = ShutdownHandler(timeout_sec=0)
    one.register()
    yield one
    one.unregister()
