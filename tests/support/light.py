"""What the tests submit that trains nothing: without torch a job starts in half the time."""

import os
import sys
import time
from pathlib import Path

PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
POLICY = {"shutdown": {"timeout_s": 60.0}, "health": {"enabled": False}}
HASTY = POLICY | {"shutdown": {"timeout_s": 6.0}}
"""For a job that does not leave by itself."""


def note(folder, name, text=""):
    """One more line in `<folder>/<name>`."""
    with Path(folder, name).open("a") as file:
        file.write(f"{text}\n")


def noted(folder, name):
    """The lines so far."""
    path = Path(folder, name)
    return path.read_text().splitlines() if path.exists() else []


def begin(folder):
    """Whether this is the first start."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    note(folder, "starts", os.getpid())
    return len(noted(folder, "starts")) == 1


def wait_without_a_run(folder):
    """Nothing is registered, so every start begins anew."""
    begin(folder)
    note(folder, "waits", os.getpid())
    time.sleep(600)


def wait_once(folder):
    """As that; the next start has nothing to wait for."""
    if begin(folder):
        note(folder, "waits", os.getpid())
        time.sleep(600)
    return "waited"


def leave(notes, code):
    """Ends by itself, as a script of anybody's may."""
    sys.exit(code)


def fail(folder):
    begin(folder)
    raise ValueError("no such luck")


def value(folder, factor, *, summand):
    begin(folder)
    return factor * 2 + summand
