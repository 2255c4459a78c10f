"""`forge cancel`: end jobs of a sweep, which save first and do not start again by themselves."""

from __future__ import annotations

import argparse
import functools
import signal
import socket
import sys
from collections.abc import Sequence

from forge import messages
from forge.cli import sweep_command
from forge.cli.sweep_command import output
from forge.errors import NoSweep, SlurmRefused
from forge.jobdir.cancel_request import CancelRequest
from forge.jobdir.job_state import State
from forge.process import processes
from forge.slurm import client
from forge.sweeps import sweep
from forge.sweeps.job import SweepJob

_WHAT = """\
End jobs of a sweep. A running job saves at its next step and exits; a cancelled job starts again
only if `forge resume` names it. This works from any machine that has the sweep's directory."""
_EXAMPLES = """\
  forge cancel 3                    job 3 of the newest sweep here
  forge cancel lr=0.1,seed=2 7
  forge cancel --all multirun/2026-01-31/12-00-00
  forge cancel --now 3              kill the job without a save"""


def main(arguments: list[str]) -> int:
    """The command `forge cancel`."""
    parser = sweep_command.parser("cancel", _WHAT, _EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="[SWEEP] JOB", help=sweep_command.JOBS)
    parser.add_argument("--all", action="store_true", help="all jobs that have not ended")
    parser.add_argument("--now", action="store_true", help="kill running jobs without a save")
    options = parser.parse_args(arguments)
    return sweep_command.run(lambda: _cancel(options))


def _cancel(options: argparse.Namespace) -> int:
    whole, jobs, are_named = sweep_command.pick(options.words, is_own=True)
    if not are_named and not whole.is_single and not options.all:
        raise NoSweep(
            f"expected the jobs to cancel, as in `{whole.command('cancel', 0)}`; `--all` cancels"
            f" all {len(jobs)} jobs of {whole.path}"
        )
    left = [job for job in jobs if not job.state.is_final]
    for job in jobs:
        if job.state.is_final and are_named:
            output([f"job {job.number} has ended before ({job.state.value})"])
    alone = [job for job in left if not job.has_wrapper]
    for job in left:
        if job.has_wrapper:
            CancelRequest(is_now=options.now).write(job.directory)
    problems = _end(alone, is_now=options.now)
    problems += _scancel([job for job in left if job.has_wrapper and job.state is State.queued])
    for text in problems:
        sys.stderr.write(messages.escape(f"forge: {text}\n", "\n"))
    look = whole.command("status")
    output(
        f"job {job.number}: asked to stop; `{messages.escape(look)}` shows when it has"
        for job in left
        if job.has_wrapper and job.state.is_active
    )
    return 1 if problems else 0


def _scancel(jobs: Sequence[SweepJob]) -> list[str]:
    """Take the jobs that wait for their start out of Slurm's queue; returns what went wrong."""
    problems = []
    for job in jobs:
        try:
            if job.slurm_id:
                client.cancel(job.slurm_id)
            output([f"job {job.number}: cancelled before it has run"])
        except SlurmRefused as error:
            problems.append(
                f"job {job.number}: Slurm does not take it out of its queue ({error}); it ends as"
                " soon as it starts"
            )
    return problems


def _end(jobs: Sequence[SweepJob], *, is_now: bool) -> list[str]:
    """End jobs that no launcher of forge started: by a signal, which the training receives itself.

    Returns:
        What went wrong.
    """
    problems = []
    for job in jobs:
        try:
            if job.slurm_id:
                client.cancel(job.slurm_id)
                output([f"job {job.number}: `scancel {job.slurm_id}`"])
                continue
        except SlurmRefused as error:
            problems.append(f"job {job.number}: `scancel {job.slurm_id}` failed: {error}")
            continue
        signum = signal.SIGKILL if is_now else signal.SIGTERM
        is_here = job.node == socket.gethostname()
        is_running = functools.partial(_is_running, job)
        if is_here and job.pid is not None and processes.send(job.pid, signum, only_if=is_running):
            output([f"job {job.number}: {signum.name} to process {job.pid}"])
            continue
        if not is_running():
            output([f"job {job.number}: process {job.pid} has ended"])
            continue
        where = f"process {job.pid} on {job.node}" if job.pid else "a process that is not known"
        problems.append(
            f"job {job.number} was not started by a launcher of forge, but is {where}: send it"
            " SIGTERM there"
        )
    return problems


def _is_running(job: SweepJob) -> bool:
    """Whether the job still runs in the process that was read before."""
    again = sweep.read_again(job.directory, job)
    return again.pid == job.pid and not again.state.is_final
