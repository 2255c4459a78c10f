"""Names of processes that no later process has: by host, pid and the time of its start."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_HERE = uuid.uuid4().hex


def owner() -> str:
    """A unique name of this process."""
    pid = os.getpid()
    # If it is not Linux, the name is only unique within this process.
    return f"{socket.gethostname()} {pid} {ticks(pid) or _HERE}"


def ticks(pid: int) -> str:
    """The kernel's ticks from boot to the start of a process; empty if they cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
