"""The command `forge`: what a sweep would submit, and what checkpoints hold.

`forge plan train.py lr=1e-3,3e-4` is the app's own command with `hydra.launcher.dry_run=true`, so
what it shows is the very value that would be submitted. No cluster is needed. `forge pin` and
`forge unpin` say which checkpoints are kept permanently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from forge.errors import CheckpointError

USAGE = """\
usage: forge plan <script> [overrides]
       forge plan -m <module> [overrides]
       forge show <path> [--verify full|size|none]
       forge diff <path> <path> [--verify full|size|none]
       forge rehearse [--times n] [--seed s] -- python <script> [arguments]
       forge pin <checkpoint>...
       forge unpin <checkpoint>...

plan: shows the batch scripts, the signals with their times, and each job's directory and overrides
that `python <script> -m hydra/launcher=slurm [overrides]` would submit. Submits nothing.

show: a checkpoint's facts and leaves. diff: the leaves in which two differ (exit code 1 where there
are any). A path is a checkpoint, a directory of them, or a job's directory. Changes nothing.

rehearse: runs a script undisturbed, then stopped, killed and resumed; compares what it ends with.
Exit code 0: identical. `forge rehearse --help` has all options.

pin: keeps checkpoints (checkpoints/step_1000, checkpoints/latest) permanently, whatever the policy
of a running job says. unpin: leaves them to the policy again.
"""
_DRY = "hydra.launcher.dry_run=true"
_NUM_PATHS = {"show": 1, "diff": 2}


def plan_command(arguments: list[str]) -> list[str]:
    """The command that shows the plan; `arguments` are those after `forge plan`."""
    count = 2 if arguments[0] == "-m" else 1
    program, overrides = arguments[:count], arguments[count:]
    overrides = [one for one in overrides if one not in ("-m", "--multirun")]
    if not any(one.startswith("hydra/launcher=") for one in overrides):
        overrides.insert(0, "hydra/launcher=slurm")
    return [sys.executable, *program, "-m", *overrides, _DRY]


def _pin(paths: list[str], is_wanted: bool) -> int:
    from forge.checkpoint.retention import pins

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
    name, *arguments = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if name == "plan" and arguments and arguments != ["-m"]:
        command = plan_command(arguments)
        os.execv(command[0], command)
    if name == "rehearse":
        from forge.rehearse import verdicts

        return verdicts.main(arguments)
    if name in _NUM_PATHS:
        verify = "full"
        if "--verify" in arguments[:-1]:
            where = arguments.index("--verify")
            verify = arguments[where + 1]
            del arguments[where : where + 2]
        if len(arguments) == _NUM_PATHS[name] and verify in ("full", "size", "none"):
            return _look(name, arguments, verify)
    if name in ("pin", "unpin") and arguments:
        return _pin(arguments, is_wanted=name == "pin")
    sys.stderr.write(USAGE)
    return 2


def _look(name: str, paths: list[str], verify: str) -> int:
    from forge.checkpoint.load.inspection import load
    from forge.cli import shown

    try:
        found = [load(path, verify=verify) for path in paths]
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n".encode(errors="replace").decode())
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
