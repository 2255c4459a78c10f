"""A handler that is gone after the test."""

import pytest

from forge.resilience import ShutdownHandler


@pytest.fixture
def handler():
    """Registered, without a forced exit, and gone after the test."""
    one = ShutdownHandler(timeout_sec=0)
    one.register()
    yield one
    one.unregister()
