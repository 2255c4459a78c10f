"""`forge resume`: start the jobs of a sweep again that have not finished."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from forge import messages
from forge.cli import sweep_command
from forge.cli.sweep_command import output
from forge.errors import ForgeError, NoSweep
from forge.jobdir.job_state import State
from forge.launch import record
from forge.launch.again import choose
from forge.launch.record import LaunchRecord
from forge.messages import escape
from forge.sweeps import to_start, words
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep
from forge.sweeps.to_start import Left

_WHAT = """\
Start the jobs of a sweep again that have not finished, from their last checkpoints, in the same
directories and with the configs of the launch. A job that was cancelled starts only if it is named.
Options of the launcher can be changed: more time, more memory, more jobs at once."""
_EXAMPLES = """\
  forge resume                               the newest sweep here
  forge resume --failed timeout_min=480 mem_gb=64
  forge resume 3 lr=0.1,seed=2               two jobs
  forge resume multirun/2026-01-31/12-00-00 --dry-run"""


def main(arguments: list[str]) -> int:
    """The command `forge resume`."""
    parser = sweep_command.parser("resume", _WHAT, _EXAMPLES)
    what = f"{sweep_command.JOBS}; or an option of the launcher, such as timeout_min=480"
    parser.add_argument("words", nargs="*", metavar="[SWEEP] [JOB] [OPTION]", help=what)
    failed = "only jobs that failed, or whose processes were lost"
    parser.add_argument("--failed", action="store_true", help=failed)
    dry = "only print which jobs would start, and which would not, and why"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    options = parser.parse_intermixed_args(arguments)
    return sweep_command.run(lambda: _resume(options))


def _resume(options: argparse.Namespace) -> int:
    words = [word for word in options.words if not choose.is_option(word)]
    overrides = [word for word in options.words if choose.is_option(word)]
    whole, jobs, are_named = sweep_command.pick(words, is_own=True)
    if whole.is_single:
        how = whole.command("resume")
        raise NoSweep(f"{whole.path} is a single run, and no sweep. To resume it: {how}")
    chosen, left = to_start.jobs_to_start(
        whole, jobs, are_named=are_named, only_failed=options.failed
    )
    try:
        launched = record.read(whole.path)
        changes = choose.changed_options(overrides, launched.launcher)
        _say(chosen, left, changes, are_named=are_named)
        if options.dry_run or not chosen:
            return 0
        return _start(whole, chosen, launched, changes)
    except ForgeError as error:
        sys.stderr.write(messages.escape(f"forge: {error}\n", "\n"))
        return int(error.exit_code)


def _say(
    chosen: Sequence[SweepJob], left: Sequence[Left], changes: dict[str, Any], *, are_named: bool
) -> None:
    """Say which jobs start, and which do not, and why; of many finished jobs only the number."""
    finished = [one for one in left if one.job.state is State.finished and not are_named]
    lines = [f"job {one.job.number} {escape(one.because)}" for one in left if one not in finished]
    if finished:
        lines.append(f"{words.count(len(finished), 'job')} finished")
    for job in chosen:
        step = f" from {job.checkpoint.path.name}" if job.checkpoint else " from step 0"
        step = "" if job.is_command else step
        label = f" ({escape(job.label)})" if job.label else ""
        lines.append(f"job {job.number}{label} starts again{step}: it was {job.state.value}")
    lines += [f"{name}={value} from now on" for name, value in changes.items()]
    output([*lines, *([] if chosen else ["no job has to start"])])


def _start(
    whole: Sweep, chosen: Sequence[SweepJob], launched: LaunchRecord, changes: dict[str, Any]
) -> int:
    if launched.launcher == "slurm":
        from forge.launch.again import slurm

        return slurm.run(whole.path, chosen, launched, changes)
    from forge.launch.again import local

    return local.run(whole.path, chosen, launched, changes)
