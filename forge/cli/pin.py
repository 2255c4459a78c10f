"""`forge pin` and `forge unpin`: checkpoints that are kept whatever the policy removes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from forge import messages
from forge.errors import CheckpointError, ExitCode

_PIN = """\
Keep checkpoints permanently. A pinned checkpoint is not removed by `checkpoint.keep_last` and the
like, also if the job is running now. A pin is an empty file next to the checkpoint,
`pinned_step_<N>`."""
_UNPIN = "Let the policy (`checkpoint.keep_last` and the like) remove pinned checkpoints again."


def pin(arguments: list[str]) -> int:
    """The command `forge pin`."""
    from forge.checkpoint.retention import pins

    return _each(_paths("pin", _PIN, arguments), pins.pin, "pinned")


def unpin(arguments: list[str]) -> int:
    """The command `forge unpin`."""
    from forge.checkpoint.retention import pins

    return _each(_paths("unpin", _UNPIN, arguments), pins.unpin, "no longer pinned")


def _paths(name: str, description: str, arguments: list[str]) -> list[Path]:
    parser = argparse.ArgumentParser(
        prog=f"forge {name}",
        description=description,
        epilog=f"Example: forge {name} checkpoints/step_1000",
    )
    what = "the directory of a checkpoint: checkpoints/step_1000, checkpoints/latest"
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", type=Path, help=what)
    found: list[Path] = parser.parse_args(arguments).checkpoints
    return found


def _each(paths: list[Path], change: Callable[[Path], Path], done: str) -> int:
    code = 0
    for path in paths:
        try:
            checkpoint = change(path)
        except (CheckpointError, OSError) as error:
            sys.stderr.write(f"forge: {messages.escape(str(error))}\n")
            code = int(ExitCode.IO_ERROR)
        else:
            sys.stdout.write(f"{done}: {messages.escape(str(checkpoint))}\n")
    return code
