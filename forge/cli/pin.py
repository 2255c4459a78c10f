"""`forge pin` and `forge unpin`: checkpoints that are kept whatever the policy removes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from forge import messages
from forge.errors import CheckpointError, DamagedCheckpoint, ExitCode
from forge.filesystem import durable
from forge.jobdir.job_files import step_of

_PIN = """\
Keep checkpoints permanently: forge does not delete a pinned checkpoint, whatever
`resilience.checkpoint.keep_last` and similar keys say. This also works while the job is running. A
pin is an empty file next to the checkpoint, `pinned_step_<N>`."""
_UNPIN = """\
Undo `forge pin`: forge can delete the checkpoints again, as `resilience.checkpoint.keep_last` and
similar keys say."""


def pin(arguments: list[str]) -> int:
    """The command `forge pin`."""
    return _each(_paths("pin", _PIN, arguments), add, "pinned")


def unpin(arguments: list[str]) -> int:
    """The command `forge unpin`."""
    return _each(_paths("unpin", _UNPIN, arguments), remove, "no longer pinned")


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


def add(path: Path) -> Path:
    """Pin the checkpoint in `path`, which can be a link like `latest`; return its directory.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    from forge.checkpoint import retention
    from forge.checkpoint.format import manifest

    given, path = path, path.resolve()
    if step_of(path) is None:
        raise CheckpointError(
            f"{given}: expected the directory of a checkpoint (step_<N>), found {path.name}"
        )
    try:
        manifest.read(path)
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{given} is not a checkpoint: {error}") from error
    retention.add_pin(path)
    # Retention checks for the pin after its rename: now the checkpoint is gone, or safe.
    if not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            retention.pin_file(path).unlink()
        raise CheckpointError(
            f"{path} cannot be pinned: the running job removed the checkpoint just now"
        )
    return path


def remove(path: Path) -> Path:
    """Remove the pin of the checkpoint in `path`; return its directory.

    Raises:
        CheckpointError: If there is no pin.
    """
    from forge.checkpoint import retention

    path = path.resolve()
    pin_file = retention.pin_file(path)
    try:
        pin_file.unlink()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not pinned: there is no {pin_file.name}") from None
    durable.sync_directory(path.parent)
    return path
