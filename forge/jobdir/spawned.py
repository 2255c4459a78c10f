"""A job whose main trains in another process: `multiprocessing`, `torch.multiprocessing.spawn`.

Such a child knows nothing of Hydra. What it has to know of its job goes to it by the environment,
which every other program that main starts inherits as well. So it counts only for
a child of multiprocessing's that runs the same program and has no Hydra config of its own.
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
"""Environment variable of what a job's main starts: which job that is, as JSON."""
_HERE = uuid.uuid4().hex


class Inherited(NamedTuple):
    """What a child knows of its job."""

    directory: Path
    command: str
    """The shell line that resumes the job."""
    started_in: Path
    """What relative paths of the job's command are relative to."""


def parent() -> Any | None:
    """The process that started this one by multiprocessing, as that has it; else None."""
    module = sys.modules.get("multiprocessing.process")
    return module.parent_process() if module is not None else None


def once_parent_is_gone(act: Callable[[], None]) -> None:
    """In a child of multiprocessing's, call `act` in another thread when its parent has ended."""
    above = parent()
    if above is None:
        return

    def wait() -> None:
        above.join()
        act()

    threading.Thread(target=wait, name="forge-parent", daemon=True).start()


def owner() -> str:
    """Names this process, or the parent of a child of multiprocessing's; no other has that name."""
    above = parent()
    pid = os.getpid() if above is None else above.pid
    try:
        began = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:  # not Linux: then it is known in this process alone
        began = _HERE
    return f"{socket.gethostname()} {pid} {began}"


def hand_on(job: Inherited | None) -> None:
    """Let children that are started from now on know their job; None: there is none."""
    os.environ.pop(VARIABLE, None)
    if job is not None:
        content = {name: str(value) for name, value in job._asdict().items()}
        os.environ[VARIABLE] = json.dumps(content | {"program": _program()})


def inherited() -> Inherited | None:
    """The job that this process is a part of, as a child of its main; None where it is none."""
    if parent() is None or VARIABLE not in os.environ:
        return None
    content = json.loads(os.environ[VARIABLE])
    if content["program"] != _program():
        return None
    return Inherited(Path(content["directory"]), content["command"], Path(content["started_in"]))


def _program() -> str:
    """The script that runs here, by which multiprocessing's children know it, too."""
    return os.path.normpath(getattr(sys.modules["__main__"], "__file__", None) or "")
