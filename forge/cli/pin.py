"""`forge pin` and `forge unpin`: checkpoints that are kept whatever the policy removes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from forge import messages
from forge.errors import CheckpointError, ExitCode

_PIN = """\
Keep checkpoints permanently: forge does not delete a pinned checkpoint, whatever
`resilience.checkpoint.keep_last` and similar keys say. This also works while the job is running. A
pin is an empty file next to the checkpoint, `pinned_step_<N>`."""
_UNPIN = """\
Undo `forge pin`: forge can delete the checkpoints again, as `resilience.checkpoint.keep_last` and
similar keys say."""


def pin(arguments: list[str]) -> int:
    """The command `forge pin`."""
    from forge.checkpoint import retention

    return _each(_paths("pin", _PIN, arguments), retention.pin, "pinned")


def unpin(arguments: list[str]) -> int:
    """The command `forge unpin`."""
    from forge.checkpoint import retention

    return _each(_paths("unpin", _UNPIN, arguments), retention.unpin, "no longer pinned")


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
