"""The command `forge`: runs commands under the policy; shows sweeps, checkpoints, nodes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from forge import messages
from forge.errors import CheckpointError

_DRY = "hydra.launcher.dry_run=true"
_PLAN = """\
shows the batch scripts, the signals with their times, and each job's directory and overrides that
`python <script> -m hydra/launcher=slurm [overrides]` would submit; submits nothing"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    plan = commands.add_parser("plan", help="show what a sweep would submit", description=_PLAN)
    plan.add_argument("-m", metavar="module", help="instead of a script")
    plan.add_argument("script", nargs="+", help="with the overrides of its sweep")
    commands.add_parser("exec", help="run any command under the policy, here or on a cluster")
    commands.add_parser("rehearse", help="stop, kill and resume a script: does it end the same?")
    commands.add_parser("doctor", help="check the health of this node by hand")
    for name, count, what in (
        ("show", 1, "a checkpoint's facts and leaves"),
        ("diff", 2, "the leaves in which two checkpoints differ; exit code 1 where there are any"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        path = "a checkpoint, a directory of them, or a job's directory; it is not changed"
        command.add_argument("paths", metavar="path", nargs=count, type=Path, help=path)
        what = "what of it is checked first: checksums, sizes, or nothing"
        command.add_argument(
            "--verify", choices=("full", "size", "none"), default="full", help=what
        )
    for name, what in (
        ("pin", "keep checkpoints permanently, whatever the policy of a running job says"),
        ("unpin", "leave checkpoints to the policy again"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        path = "its directory: checkpoints/step_1000, checkpoints/latest"
        command.add_argument("paths", metavar="checkpoint", nargs="+", type=Path, help=path)
    return parser


def main() -> int:
    """The command `forge`."""
    name, *arguments = sys.argv[1:] or [""]
    # What follows these is another program's to understand.
    if name == "exec":
        from forge.launch.exec import main as execute

        return execute(arguments)
    if name == "rehearse":
        from forge.rehearse.command import main as rehearse

        return rehearse(arguments)
    if name == "doctor":
        from forge.cli.doctor import main as examine

        return examine(arguments)
    if name == "plan" and arguments not in ([], ["-m"], ["-h"], ["--help"]):
        command = plan_command(arguments)
        os.execv(command[0], command)
    options = _parser().parse_args()
    if options.command in ("pin", "unpin"):
        return _pin(options.paths, is_wanted=options.command == "pin")
    return _inspect(options.command, options.paths, options.verify)


def plan_command(arguments: list[str]) -> list[str]:
    """The app's own command, which shows the very value that it would submit; needs no cluster.

    `arguments` are those after `forge plan`.
    """
    count = 2 if arguments[0] == "-m" else 1
    program, overrides = arguments[:count], arguments[count:]
    overrides = [one for one in overrides if one not in ("-m", "--multirun")]
    if not any(one.startswith("hydra/launcher=") for one in overrides):
        overrides.insert(0, "hydra/launcher=slurm")
    return [sys.executable, *program, "-m", *overrides, _DRY]


def _pin(paths: list[Path], *, is_wanted: bool) -> int:
    from forge.checkpoint.retention import pins

    code = 0
    for path in paths:
        try:
            found = (pins.pin if is_wanted else pins.unpin)(path)
        except (CheckpointError, OSError) as error:
            sys.stderr.write(f"forge: {messages.escape(str(error))}\n")
            code = 1
        else:
            shown = messages.escape(str(found))
            sys.stdout.write(f"{'pinned' if is_wanted else 'no longer pinned'}: {shown}\n")
    return code


def _inspect(name: str, paths: list[Path], verify: str) -> int:
    from forge.checkpoint.load.inspection import load
    from forge.cli import shown

    try:
        found = [load(path, verify=verify) for path in paths]
    except CheckpointError as error:
        sys.stderr.write(messages.escape(f"{error}\n", "\n"))
        return int(error.exit_code)
    if name == "show":
        _print(shown.describe(*found))
        return 0
    return 1 if _print(shown.compare(*found)) else 0


def _print(lines: Iterable[str]) -> int:
    """How many lines there were; whoever reads them may stop early."""
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


if __name__ == "__main__":
    sys.exit(main())
