"""`forge plan train.py lr=1e-3,3e-4`: what a sweep would submit, and when it would be signalled.

It is the app's own command with `hydra.launcher.dry_run=true`, so what it shows is the very value
that would be submitted. No cluster is needed.
"""

from __future__ import annotations

import os
import sys

USAGE = """\
usage: forge plan <script> [overrides]
       forge plan -m <module> [overrides]

Shows the batch scripts, the signals with their times, and each job's directory and overrides that
`python <script> -m hydra/launcher=slurm [overrides]` would submit. Submits nothing.
"""
_DRY = "hydra.launcher.dry_run=true"


def plan_command(arguments: list[str]) -> list[str]:
    """The command that shows the plan; `arguments` are those after `forge plan`."""
    count = 2 if arguments[0] == "-m" else 1
    program, overrides = arguments[:count], arguments[count:]
    overrides = [one for one in overrides if one not in ("-m", "--multirun")]
    if not any(one.startswith("hydra/launcher=") for one in overrides):
        overrides.insert(0, "hydra/launcher=slurm")
    return [sys.executable, *program, "-m", *overrides, _DRY]


def main() -> int:
    """The command `forge`."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if arguments[:1] != ["plan"] or not arguments[1:] or arguments[1:] == ["-m"]:
        sys.stderr.write(USAGE)
        return 2
    command = plan_command(arguments[1:])
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
