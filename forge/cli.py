"""The command `forge`.

`forge plan train.py lr=1e-3,3e-4` shows what a sweep would submit, and when it would be signalled.
It is the app's own command with `hydra.launcher.dry_run=true`, so what it shows is the very value
that would be submitted. No cluster is needed. `forge pin` and `forge unpin` keep checkpoints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forge.errors import CheckpointError

USAGE = """\
usage: forge plan <script> [overrides]
       forge plan -m <module> [overrides]
       forge pin <checkpoint>...
       forge unpin <checkpoint>...

plan shows the batch scripts, the signals with their times, and each job's directory and overrides
that `python <script> -m hydra/launcher=slurm [overrides]` would submit. It submits nothing.

pin keeps checkpoints (checkpoints/step_1000, checkpoints/latest) for ever, whatever the policy of
a running job says; unpin leaves them to the policy again.
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


def _pin(paths: list[str], is_wanted: bool) -> int:
    from forge.checkpoint import pins

    code = 0
    for path in paths:
        try:
            found = (pins.pin if is_wanted else pins.unpin)(Path(path))
        except (CheckpointError, OSError) as error:
            sys.stderr.write(f"forge: {error}\n")
            code = 1
        else:
            sys.stdout.write(f"{'pinned' if is_wanted else 'no longer pinned'}: {found}\n")
    return code


def main() -> int:
    """The command `forge`."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if arguments[:1] in (["pin"], ["unpin"]) and arguments[1:]:
        return _pin(arguments[1:], is_wanted=arguments[0] == "pin")
    if arguments[:1] != ["plan"] or not arguments[1:] or arguments[1:] == ["-m"]:
        sys.stderr.write(USAGE)
        return 2
    command = plan_command(arguments[1:])
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
