"""`forge logs`: the output of a job."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from forge.cli import sweep_command
from forge.errors import NoSweep
from forge.filesystem.files import open_file
from forge.sweeps import output, sweep
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep

_WHAT = """\
Print the output of a job, over all of its attempts: the file `output.log` in its directory. Rank R
of several writes `output.log.R`."""
_EXAMPLES = """\
  forge logs 3                   job 3 of the newest sweep here
  forge logs lr=0.1,seed=2 -f    follow the output of a job
  forge logs 3 | tail -n 50      the last 50 lines"""
_CHUNK = 1 << 20
_LOOK_S = 0.5


def main(arguments: list[str]) -> int:
    """The command `forge logs`."""
    parser = sweep_command.parser("logs", _WHAT, _EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="[SWEEP] JOB", help=sweep_command.JOBS)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print what comes, until the end"
    )
    options = parser.parse_args(arguments)
    return sweep_command.run(lambda: _print(options))


def _print(options: argparse.Namespace) -> int:
    whole, jobs, _ = sweep_command.pick(options.words)
    if len(jobs) != 1:
        raise NoSweep(
            f"expected one job, found {len(jobs)} in {whole.path}: name a job by its number or its"
            f" overrides, as in `{whole.command('logs', 0)}`"
        )
    (job,) = jobs
    path = output.path_of(job.directory)
    if not path.exists():
        raise NoSweep(_no_output(whole, job, path))
    try:
        at = _copy(path, 0)
        if options.follow:
            _follow(whole.path, job, path, at)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _no_output(whole: Sweep, job: SweepJob, path: Path) -> str:
    if whole.is_single:
        return (
            f"{path} does not exist: a run without a launcher prints to the terminal, or to the"
            " file of `#SBATCH --output`"
        )
    waits = f": {job.waits_for}" if job.waits_for else ""
    return (
        f"job {job.number} has no output yet, since it has not started ({job.state.value}{waits})"
    )


def _copy(path: Path, begin: int) -> int:
    """Copy the file from a position to standard output; returns the position after it."""
    at = begin
    with os.fdopen(open_file(path), "rb") as file:
        file.seek(begin)
        while chunk := file.read(_CHUNK):
            sys.stdout.buffer.write(chunk)
            at += len(chunk)
    sys.stdout.buffer.flush()
    return at


def _follow(path: Path, job: SweepJob, file: Path, at: int) -> None:
    """Copy what is appended, until the job has ended."""
    while True:
        is_last = sweep.read_again(path, job).state.is_final
        at = _copy(file, at)
        if is_last:
            return
        # Poll: a change on another machine's disk sends no event.
        time.sleep(_LOOK_S)
