"""Which jobs have living processes on this machine, without touching their locks.

Taking a job's lock to see whether it is free could make its wrapper wait. On Linux /proc/locks
lists the locks that processes of this machine hold; locks of other machines are not in it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from forge.jobdir.job_files import LOCK, forge_dir


class HeldLocks:
    """The locks held on this machine when the object was made."""

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self._held: dict[str, list[tuple[str, str]]] | None = None
        """Inode -> (device, pid) of each lock."""
        try:
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:  # not Linux
            return
        self._held = {}
        for line in lines:
            words = line.partition("WRITE")[2].split()
            if len(words) < 2:
                continue
            pid, place = words[:2]
            device, _, inode = place.rpartition(":")
            self._held.setdefault(inode, []).append((device, pid))

    def is_held(self, directory: Path, pid: int | None = None) -> bool | None:
        """Whether a process of this machine holds the lock of a job or sweep; None if unknown.

        Args:
            directory: Of the job or sweep.
            pid: The process that is known to have taken it, for file systems whose device number
                in /proc/locks differs from that of `stat`, such as btrfs.
        """
        if self._held is None:
            return None
        try:
            status = os.stat(forge_dir(directory) / LOCK)
        except OSError:
            return False
        own = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        holders = self._held.get(str(status.st_ino), [])
        return any(device == own or holder == str(pid) for device, holder in holders)
