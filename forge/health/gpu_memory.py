"""The memory that other processes use on a task's GPUs.

The memory of a killed process is freed a moment after its end, so that the next process can find
its GPU full. Before training, this check waits for such memory. If the check's action is not
`warn`, it also waits for running processes: an earlier job can still be stopping.
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
"""Seconds before the timeout of `make`, so that the answer is in time."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h
FAMILIES = (
    (TOKEN,),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
)
"""Sets of variables: only processes of one job have the same values for all of a set."""


def gpu_memory(context: Context) -> Finding | None:
    """Whether other processes use more than 512 MiB of a GPU; waits for them to end."""
    if not _knows_pids():
        return None  # the driver has the pids of another namespace: ours are not recognised there
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
    """Memory of others on a GPU; adds processes that have ended already to `leaving`."""
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
        f"{mib:.0f} MiB used by other processes" + (f": {', '.join(named)}" if named else ""),
        is_failed=mib > _MAX_MIB,
        remedy="Kill these processes; if they do not exit, have the node checked.",
    )


def _knows_pids() -> bool:
    """Whether this process has the driver's pids: not in a container's pid namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _family(pids: Iterable[int]) -> set[int]:
    """The pids of this process, its descendants, and processes of the same job."""
    own = {os.getpid(), *processes.descendants()}
    mine = [{name: os.environ.get(name) for name in names} for names in FAMILIES]
    known = [family for family in mine if None not in family.values()]
    return {pid for pid in pids if pid in own or any(_is_of(pid, family) for family in known)}


def _is_of(pid: int, family: dict[str, str | None]) -> bool:
    return all(processes.variable(pid, name) == value for name, value in family.items())


def _has_ended(pid: int) -> bool:
    """Whether the process ended and only its memory is left; False if hidden (`hidepid`)."""
    try:
        state = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2]
        return state.split()[0] in "ZXD"  # D: the driver is cleaning up
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # a process of another user
            pass
        return False


def _described(pid: int) -> str:
    """For people: the pid, the user and the command."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in processes.command(pid))
    try:
        user = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        shown = ""
    if not shown:
        return f"pid {pid}, which {'has ended' if _has_ended(pid) else 'is hidden'}"
    return f"pid {pid} of user {user} (`{shown[:77]}{'…' if len(shown) > 77 else ''}`)"
