"""Jobs whose launcher was killed: they save and leave, and nobody starts them again until then."""

from __future__ import annotations

import time
from pathlib import Path

from forge import messages
from forge.errors import DirectoryInUse
from forge.job.supervisor import MARGIN_S, ORPHANED_S
from forge.jobdir import plan
from forge.jobdir.job_files import STATE, forge_dir, is_busy, read_json

_PATIENCE_S = 30.0
"""Beyond what a job has for its own stop."""
_LOOK_S = 0.05


def wait_for(directories: list[Path]) -> None:
    """Return once nothing of an earlier start of these jobs is alive.

    Raises:
        DirectoryInUse: Where something is, long after its own deadline.
    """
    busy = [directory for directory in directories if is_busy(directory)]
    if not busy:
        return
    messages.say(f"Waiting for {len(busy)} jobs of a launcher that was killed: they are saving")
    began = time.monotonic()
    while busy:
        passed_s = time.monotonic() - began
        late = next((one for one in busy if passed_s > _deadline_s(one)), None)
        if late is not None:
            pid = (read_json(forge_dir(late) / STATE) or {}).get("pid", "unknown")
            raise DirectoryInUse(
                f"{late} is still held by an earlier start of this job, {passed_s:.0f} s after its"
                f" launcher was gone (pid of its wrapper: {pid}). Is it stopped, or in a debugger?"
                " Continue or end it, and start the sweep again."
            )
        time.sleep(_LOOK_S)  # a lock that becomes free is no event that a process could wait for
        busy = [directory for directory in busy if is_busy(directory)]


def _deadline_s(directory: Path) -> float:
    return (plan.read_earlier(directory).timeout_s or ORPHANED_S) + MARGIN_S + _PATIENCE_S
