"""Processes that end with the test that started them, so that its failure stays its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_started: list[subprocess.Popen] = []


class Popen(subprocess.Popen):
    """Ended when the test is over; one that a fixture for several tests starts, with the last."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _started.append(self)


@contextmanager
def ended_here() -> Iterator[None]:
    """Whatever is started inside is ended at the end, with its process group where it leads one."""
    before = len(_started)
    try:
        yield
    finally:
        while len(_started) > before:
            _end(_started.pop())


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        leads = os.getpgid(process.pid) == process.pid
        (os.killpg if leads else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
