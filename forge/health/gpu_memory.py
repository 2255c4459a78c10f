"""What other processes hold of the memory of a task's own GPUs.

What a process held that was killed goes a moment after it, so that the next one may find its GPU
full. Before a training begins, those that are about to go are waited for; where the policy acts on
this check, all others are, too: an earlier job may still be asked to stop.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path

from forge.config.schema import CheckAction
from forge.errors import GpuGone
from forge.health.check import TIMEOUT_S, Context, Finding
from forge.health.gpu_driver import of_each
from forge.health.nvml import Gpu
from forge.jobdir.job_files import TOKEN
from forge.process import processes

_MAX_MIB = 512
"""Source: NVIDIA's resiliency extension, which waits for less before a restart (`config.py`)."""
_LOOK_S = 1.0
_MARGIN_S = 5.0
"""So much before `make` stops waiting, so that the answer comes in time."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h
FAMILIES = (
    (TOKEN,),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that, all together, only the processes of one job have with the same values."""


def gpu_memory(context: Context) -> Finding | None:
    """Whether other processes hold more of its memory than 512 MiB; waits for them to go."""
    if not _knows_pids():
        return None  # the driver has the numbers of another namespace: ours could be among others'
    end = time.monotonic() + TIMEOUT_S - _MARGIN_S
    while True:
        leaving: list[int] = []
        finding = of_each(context, functools.partial(_held, leaving=leaving))
        is_worth_it = leaving or context.action is not CheckAction.warn
        if finding is None or not finding.is_failed or context.is_beside or not is_worth_it:
            return finding
        if time.monotonic() > end or context.stopped.wait(_LOOK_S):
            return finding


def _held(gpu: Gpu, leaving: list[int]) -> Finding | None:
    """What others hold of one GPU; those whose memory is about to go are added to `leaving`."""
    try:
        running = None if gpu.is_split else gpu.ask("ComputeRunningProcesses_v3")
    except GpuGone:  # `gpu_driver` says so
        return None
    if running is None:
        return None
    others = {process.pid: (process.usedGpuMemory or 0) / 2**20 for process in running}
    for pid in _family(others):
        del others[pid]
    leaving += filter(_has_ended, others)
    largest = sorted(others, key=lambda pid: -others[pid])
    named = [f"{others[pid]:.0f} MiB by {_described(pid)}" for pid in largest[:4]]
    if len(largest) > 4:
        named.append(f"and by {len(largest) - 4} more")
    mib = sum(others.values())
    return Finding(
        f"{mib:.0f} MiB held by others" + (f": {', '.join(named)}" if named else ""),
        is_failed=mib > _MAX_MIB,
        remedy="Kill these processes; if they do not exit, have the node checked.",
    )


def _knows_pids() -> bool:
    """Whether this process counts processes as the driver does: not within a container's count."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _family(pids: Iterable[int]) -> set[int]:
    """Those of them that are this process, descend from it or belong to the same job."""
    own = {os.getpid(), *processes.descendants()}
    mine = [{name: os.environ.get(name) for name in names} for names in FAMILIES]
    known = [family for family in mine if None not in family.values()]
    return {pid for pid in pids if pid in own or any(_is_of(pid, family) for family in known)}


def _is_of(pid: int, family: dict[str, str | None]) -> bool:
    return all(processes.variable(pid, name) == value for name, value in family.items())


def _has_ended(pid: int) -> bool:
    """Whether only its memory is still to go; not of one that is hidden (`hidepid`)."""
    try:
        state = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2]
        return state.split()[0] in "ZXD"  # D: it is being taken down by the driver
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is somebody else's
            pass
        return False


def _described(pid: int) -> str:
    """For people: its number, what it runs and whose it is."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in processes.command(pid))
    try:
        user = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        shown = ""
    if not shown:
        return f"pid {pid}, which {'has ended' if _has_ended(pid) else 'is hidden'}"
    return f"pid {pid} of user {user} (`{shown[:77]}{'…' if len(shown) > 77 else ''}`)"
