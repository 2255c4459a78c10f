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
from forge.sweeps import attempts, output, sweep
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep

_WHAT = """\
Print the output of a job, over all of its attempts or of one. For a job that waits, that is the
output of its earlier attempts."""
_EXAMPLES = """\
  forge logs 3                   job 3 of the newest sweep here
  forge logs lr=0.1,seed=2 -f    follow the output of a job
  forge logs 3 --attempt 2 --rank 1
  forge logs 3 | tail -n 50      the last 50 lines
  tail -f $(forge logs 3 --path)"""
_CHUNK = 1 << 20
_LOOK_S = 0.5


def main(arguments: list[str]) -> int:
    """The command `forge logs`."""
    parser = sweep_command.parser("logs", _WHAT, _EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="[SWEEP] JOB", help=sweep_command.JOBS)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print what comes, until the end"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="only attempt N, from 1")
    parser.add_argument("--rank", type=int, metavar="R", default=0, help="of rank R (default: 0)")
    parser.add_argument("--path", action="store_true", help="print only the path of the file")
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
    path = output.path_of(job.directory, options.rank)
    if options.path:
        return sweep_command.output([str(path)])
    begin, end = _span(job, options)
    if not path.exists():
        raise NoSweep(_no_output(whole, job, path, options.rank))
    try:
        at = _copy(path, begin, end)
        if options.follow:
            _follow(whole.path, job, path, at)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _span(job: SweepJob, options: argparse.Namespace) -> tuple[int, int | None]:
    """The first byte, and the byte after the last one; None: to the end."""
    if options.attempt is None:
        return 0, None
    found = attempts.read(job.directory)
    if not 1 <= options.attempt <= len(found):
        raise NoSweep(
            f"`--attempt {options.attempt}`: job {job.number} has had {len(found)} attempts"
        )
    own, *later = found[options.attempt - 1 :]
    if len(own.log) <= options.rank:
        raise NoSweep(
            f"`--attempt {options.attempt}`: it is not recorded where the output of this attempt"
            " begins (an earlier version of forge ran it, or the job has no launcher)"
        )
    following = later[0].log if later else ()
    return own.log[options.rank], following[options.rank] if following else None


def _no_output(whole: Sweep, job: SweepJob, path: Path, rank: int) -> str:
    if whole.is_single:
        return (
            f"{path} does not exist: a run without a launcher prints to the terminal, or to the"
            " file of `#SBATCH --output`"
        )
    if rank:
        return f"{path} does not exist: the job has no rank {rank}, or it has not started"
    waits = f": {job.waits_for}" if job.waits_for else ""
    return (
        f"job {job.number} has no output yet, since it has not started ({job.state.value}{waits})"
    )


def _copy(path: Path, begin: int, end: int | None) -> int:
    """Copy a part of the file to standard output; returns the position after it."""
    at = begin
    with os.fdopen(open_file(path), "rb") as file:
        file.seek(begin)
        while chunk := file.read(_CHUNK if end is None else min(_CHUNK, end - at)):
            sys.stdout.buffer.write(chunk)
            at += len(chunk)
    sys.stdout.buffer.flush()
    return at


def _follow(path: Path, job: SweepJob, file: Path, at: int) -> None:
    """Copy what is appended, until the job has ended."""
    while True:
        is_last = sweep.read_again(path, job).state.is_final
        at = _copy(file, at, None)
        if is_last:
            return
        # Poll: a change on another machine's disk sends no event.
        time.sleep(_LOOK_S)
