"""`forge plan`: what a sweep would submit to Slurm."""

from __future__ import annotations

import argparse
import os
import sys

_DRY = "hydra.launcher.dry_run=true"
_PLAN = """\
Print what `python SCRIPT -m hydra/launcher=slurm OVERRIDES` would submit: the batch scripts, when
each signal is sent, and each job's directory and overrides. Nothing is submitted; Slurm need not be
installed."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge plan",
        usage="forge plan [-h] (SCRIPT | -m MODULE) [OVERRIDE ...]",
        description=_PLAN,
        epilog="Example: forge plan train.py lr=1e-3,3e-4 hydra.launcher.timeout_min=240",
    )
    parser.add_argument("-m", metavar="MODULE", help="a module instead of a script, as for python")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="the sweep's overrides")
    return parser


def main(arguments: list[str]) -> int:
    """The command `forge plan`: become the script's own process, which prints the plan."""
    parser = _parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.parse_args(arguments)
        parser.error("expected a script, or -m and a module, before the overrides")
    if arguments == ["-m"]:
        parser.error("expected a module after -m")
    if arguments[0] != "-m" and not os.path.exists(arguments[0]):
        parser.error(f"{arguments[0]}: there is no such file; expected a script in {os.getcwd()}")
    command = command_of(arguments)
    os.execv(command[0], command)


def command_of(arguments: list[str]) -> list[str]:
    """The command that prints the plan: the script itself, with `hydra.launcher.dry_run=true`.

    Args:
        arguments: Those after `forge plan`.
    """
    count = 2 if arguments[0] == "-m" else 1
    program, overrides = arguments[:count], arguments[count:]
    overrides = [word for word in overrides if word not in ("-m", "--multirun")]
    if not any(word.startswith("hydra/launcher=") for word in overrides):
        overrides.insert(0, "hydra/launcher=slurm")
    return [sys.executable, *program, "-m", *overrides, _DRY]
