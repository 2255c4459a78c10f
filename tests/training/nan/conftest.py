"""Runs that halt or stop inside the test's own process."""

import signal

import pytest

from forge.process import processes
from forge.shutdown import stopping


@pytest.fixture(autouse=True)
def _a_stop_does_not_end_the_tests(monkeypatch):
    """A halt starts a guard that ends the process ten seconds later; here it lives."""
    on_child = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(stopping, "_start_guard", lambda code: None)
    monkeypatch.setattr(processes, "end_descendants", lambda job, save_s: 0)
    yield
    stopping.uninstall()
    signal.signal(signal.SIGCHLD, on_child)
