"""`forge verify`: are all checkpoints of a sweep, a run or a directory intact?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from forge.cli import sweep_command
from forge.errors import CheckpointError, ExitCode, NoSweep
from forge.jobdir.job_files import step_dirs, step_of
from forge.messages import escape
from forge.sweeps import as_json, find, ledger_tail, sweep
from forge.sweeps.render import Line

_WHAT = """\
Check the checksums of all checkpoints of a sweep, of a run, or in a directory. Exit code: 0 if all
are intact, 74 if one is damaged. Nothing is changed, so it works while jobs run."""
_EXAMPLES = """\
  forge verify                                   the newest sweep here
  forge verify outputs/2026-01-31/12-00-00
  forge verify checkpoints/step_100"""


def main(arguments: list[str]) -> int:
    """The command `forge verify`."""
    parser = sweep_command.parser("verify", _WHAT, _EXAMPLES)
    what = f"a checkpoint, a directory of checkpoints, or the {sweep_command.WHERE}"
    parser.add_argument("path", nargs="?", metavar="DIR", help=what)
    parser.add_argument("--size", action="store_true", help="only the sizes of the files: quick")
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    options = parser.parse_args(arguments)
    return sweep_command.run(lambda: _verify(options))


def _verify(options: argparse.Namespace) -> int:
    from forge.checkpoint.inspection import load

    found: list[dict[str, object]] = []

    def check() -> Iterator[Line]:
        for path in _checkpoints(options.path):
            problem = ""
            try:
                load(path, verify="size" if options.size else "full")
            except CheckpointError as error:
                if not path.exists():
                    continue  # a running job has removed it meanwhile
                problem = str(error)
            found.append({"path": path, "is_intact": not problem, "problem": problem})
            if problem:
                yield Line(f"DAMAGED  {escape(problem)}", "red")
            else:
                yield Line(f"intact   {escape(str(path))}", "green")
        num_damaged = sum(not one["is_intact"] for one in found)
        counts = f"{len(found)} checked, {num_damaged} damaged"
        yield Line(counts if found else "there is no checkpoint yet")

    if options.json:
        list(check())
        sweep_command.output([as_json.dumps({"checkpoints": found})])
    else:
        sweep_command.output(check())
    return 0 if all(one["is_intact"] for one in found) else int(ExitCode.IO_ERROR)


def _checkpoints(wanted: str | None) -> Iterator[Path]:
    """The checkpoints that are meant, job by job, the newest first."""
    if wanted is not None:
        path = find.existing(wanted)
        if path is not None and path.is_dir() and (step_of(path) is not None or _steps(path)):
            yield from [path] if step_of(path) is not None else _steps(path)
            return
    found = find.find(wanted)
    whole = sweep.sweep(found.path)
    for job in [whole.find(found.job)] if found.job else whole.jobs:
        places = dict.fromkeys(ledger_tail.checkpoint_dirs(job.directory))
        for place in places:
            yield from _steps(place)


def _steps(path: Path) -> list[Path]:
    try:
        return step_dirs(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NoSweep(f"{path} cannot be read: {error.strerror}") from error
