"""Training in a child process of main: `multiprocessing`, `torch.multiprocessing.spawn`.

Such a child has no Hydra config. It gets its job through an environment variable, which all other
programs that main starts inherit as well. So the variable only counts in a multiprocessing child
that runs the same program and has no Hydra config of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "FORGE_JOB"
"""Environment variable of processes that a job's main starts: the job, as JSON."""
_HERE = uuid.uuid4().hex


class Inherited(NamedTuple):
    """The job of a child process."""

    directory: Path
    command: str
    """The shell line that resumes the job."""
    started_in: Path
    """The directory to which relative paths in the job's command refer."""


def parent() -> Any | None:
    """multiprocessing's object for the parent of this process; None if there is none."""
    module = sys.modules.get("multiprocessing.process")
    return module.parent_process() if module is not None else None


def on_parent_exit(act: Callable[[], None]) -> None:
    """In a multiprocessing child, call `act` in another thread when the parent has ended."""
    above = parent()
    if above is None:
        return

    def wait() -> None:
        above.join()
        act()

    threading.Thread(target=wait, name="forge-parent", daemon=True).start()


def owner() -> str:
    """A unique name of this process or, in a multiprocessing child, of its parent."""
    above = parent()
    pid = os.getpid() if above is None else above.pid
    # If it is not Linux, the name is only unique within this process.
    return f"{socket.gethostname()} {pid} {ticks(pid) or _HERE}"


def ticks(pid: int) -> str:
    """The kernel's ticks from boot to the start of a process; empty if they cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def hand_on(job: Inherited | None) -> None:
    """Pass the job to children started from now on; None: they get no job."""
    os.environ.pop(VARIABLE, None)
    if job is not None:
        content = {name: str(value) for name, value in job._asdict().items()}
        os.environ[VARIABLE] = json.dumps(content | {"program": _program()})


def inherited() -> Inherited | None:
    """The job of this process if it is a multiprocessing child of the job's main, else None."""
    if parent() is None or VARIABLE not in os.environ:
        return None
    content = json.loads(os.environ[VARIABLE])
    if content["program"] != _program():
        return None
    return Inherited(Path(content["directory"]), content["command"], Path(content["started_in"]))


def _program() -> str:
    """The path of the running script; the same in multiprocessing children."""
    return os.path.normpath(getattr(sys.modules["__main__"], "__file__", None) or "")
