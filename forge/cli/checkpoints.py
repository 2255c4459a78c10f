"""`forge show` and `forge diff`: their arguments, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from forge import messages
from forge.errors import CheckpointError, DamagedCheckpoint

_SHOW = """\
Print a checkpoint's step, time and size, whether its files are intact, how to resume from it, and
which objects it has; with -v also each tensor and value. Nothing is changed, so that a running job
is not disturbed."""
_DIFF = """\
List each tensor and value in which two checkpoints differ, and by how much. Exit code: 0 if they
are the same, 1 if they differ. Nothing is changed."""
_PATH = (
    "a checkpoint (step_<N>), or the directory of the checkpoints or of the job (then the newest"
    " checkpoint in it)"
)
_VERIFY = "check all checksums (full, the default), only the sizes of the files, or nothing"


def _parser(name: str, description: str, example: str, num_paths: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"forge {name}", description=description, epilog=f"Example: {example}"
    )
    parser.add_argument("paths", metavar="PATH", nargs=num_paths, type=Path, help=_PATH)
    choices = ("full", "size", "none")
    parser.add_argument("--verify", choices=choices, default="full", help=_VERIFY)
    return parser


def show(arguments: list[str]) -> int:
    """The command `forge show`."""
    parser = _parser("show", _SHOW, "forge show checkpoints/latest", 1)
    what = "list the files, and each tensor and value"
    parser.add_argument("-v", "--verbose", action="store_true", help=what)
    options = parser.parse_args(arguments)

    from forge.checkpoint.inspection import load
    from forge.cli import shown

    (path,) = options.paths
    try:
        checkpoint = load(path, verify=options.verify)
    except DamagedCheckpoint as error:
        return _failed(error, shown.damaged(path, str(error)))
    except CheckpointError as error:
        return _failed(error)
    _print(shown.describe(checkpoint, options.verify, is_verbose=options.verbose))
    return 0


def diff(arguments: list[str]) -> int:
    """The command `forge diff`."""
    example = "forge diff checkpoints/step_100 checkpoints/step_200"
    options = _parser("diff", _DIFF, example, 2).parse_args(arguments)

    from forge.checkpoint.inspection import load
    from forge.cli import shown

    try:
        a, b = (load(path, verify=options.verify) for path in options.paths)
    except CheckpointError as error:
        return _failed(error)
    return 1 if _print(shown.compare(a, b)) else 0


def _failed(error: CheckpointError, report: Iterable[str] = ()) -> int:
    if not _print(report):
        sys.stderr.write(messages.escape(f"forge: {error}\n", "\n"))
    return int(error.exit_code)


def _print(lines: Iterable[str]) -> int:
    """Print lines; returns how many there were. `forge show … | head` reads only the first ones."""
    count = 0
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        for line in lines:
            count += 1
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return count
