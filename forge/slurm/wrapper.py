"""The wrapper of a job in a batch script: `python -m forge.slurm.wrapper <bundle>`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from forge.errors import ExitCode, SlurmError, is_disk_full
from forge.filesystem.files import exit_on_error
from forge.job.ending import Ending
from forge.job.requeue import decide_restart, spread
from forge.job.wrapper import Wrapper, job_of
from forge.jobdir import plan as plan_file
from forge.jobdir.job_state import Counts
from forge.slurm import bundle, client
from forge.slurm.allocation import ASK_S
from forge.slurm.wrapped_job import WrappedJob


def wrapper_of(directory: Path, script: Path) -> Wrapper:
    """The wrapper of the job in a directory; `script` is the batch script."""
    plan, restarts = plan_file.read(directory), os.environ.get("SLURM_RESTART_COUNT") or "0"
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    job = job_of(directory, plan, job=client.own_job(os.environ), start=restarts, nodes=nodes)
    return Wrapper(plan, WrappedJob(job, plan, script))


def _wait_for_room(path: Path, number: int, error: OSError) -> int:
    """The disk is full at the first start: requeue the job for later, within its limits."""
    job, limits = client.own_job(os.environ), bundle.read_plan(path, number).requeue
    # All restarts so far had this cause: once unpacked, a job has a state of its own.
    counts = Counts(failures=int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    decision = decide_restart(Ending.of(ExitCode.DISK_FULL), counts, limits, -1, has_run=False)
    decision = spread(decision, job, counts.failures)
    text = f"{decision.because} ({error})"
    try:
        if decision.starts_again:
            client.requeue(job, 6 * ASK_S)
            client.delay(job, decision.pause_s, ASK_S)
    except SlurmError as refusal:
        text += f"; could not be requeued: {refusal}"
    with contextlib.suppress(OSError):  # stderr can be on the same disk
        os.write(2, f"forge: {text}\n".encode())
    return int(ExitCode.DISK_FULL)


@exit_on_error()
def main(arguments: list[str]) -> int:
    """`python -m forge.slurm.wrapper <bundle>`."""
    (path,) = arguments
    number = int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)
    try:
        directory = bundle.unpack(Path(path), number)
    except OSError as error:
        if is_disk_full(error):
            return _wait_for_room(Path(path), number, error)
        raise
    return wrapper_of(directory, Path(path).with_suffix(".sh")).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
