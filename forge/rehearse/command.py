"""The command line of `forge rehearse`."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.errors import ExitCode
from forge.process import children, processes
from forge.rehearse import terminal
from forge.rehearse.plan import SIGNALS, STOPS, signals_of

_USAGE = "forge rehearse [-h] [OPTION ...] -- COMMAND ..."
_WHAT = """\
Test whether a training script resumes with the same bits. The script runs twice without
interruption, then several times with signals at random steps, and is started again after each
signal. forge compares the checkpoints and logged values of all runs. For a run that differs, it
names the variables that were not saved."""
_EPILOG = """\
Exit code: 0 if all runs are identical, 1 if runs differ, 3 if there is no verdict, because the
script failed by itself. Example: forge rehearse --times 1 -- python train.py"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge rehearse", usage=_USAGE, description=_WHAT, epilog=_EPILOG
    )
    parser.add_argument(
        "--times",
        metavar="N",
        type=int,
        default=3,
        help="number of runs to interrupt and resume, each at other steps (default: 3)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="random seed for the signals and the steps at which they are sent (default: 0)",
    )
    names = ", ".join(name.removeprefix("SIG") for name in [*STOPS, "SIGKILL"])
    parser.add_argument(
        "--signals",
        metavar="NAMES",
        type=_of(signals_of, f"expected one or more of {names}, separated by commas"),
        default=SIGNALS,
        help=f"signals for the interrupted runs: one or more of {names}, separated by commas; the"
        " seed determines which signal is sent (default: TERM,USR1,KILL)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=0.0,
        help="allowed difference of floating-point numbers, relative to the largest number in their"
        " tensor (default: 0, the same bits)",
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        help="new directory for the files of all runs; it is kept (default: a temporary directory,"
        " removed if the results are the same)",
    )
    parser.add_argument(
        "--timeout-s",
        metavar="S",
        type=float,
        help="seconds after which a start of the script that has not exited is killed, and the"
        " rehearsal fails (default: ten times the duration of the first run, and 60 s more)",
    )
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help="the command that starts the training: python train.py lr=1e-3",
    )
    return parser


def _of(convert: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: {expected}") from None

    return converted


def main(arguments: list[str]) -> int:
    """The command `forge rehearse`; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("expected a command after `--`, such as `-- python train.py`")
    if options.times < 1:
        parser.error(f"--times {options.times}: expected at least 1")
    if not 0 <= options.tolerance < 1:
        parser.error(f"--tolerance {options.tolerance:g}: expected at least 0, and less than 1")
    if shutil.which(command[0]) is None:
        sys.stderr.write(
            f"forge rehearse: {shlex.quote(command[0])}: expected a program, found none of that"
            " name. Correct the name, or give the absolute path.\n"
        )
        return int(ExitCode.BAD_CONFIG)
    if options.directory is not None:
        try:
            options.directory.mkdir(parents=True)
        except OSError as error:
            parser.error(
                f"--directory {options.directory}: expected a new directory, which forge creates,"
                f" but creating it failed ({error.strerror})"
            )
    # They import torch, which takes seconds, and which `--help` and the completion do not need.
    from forge.rehearse import verdicts
    from forge.rehearse.rehearsal import Rehearsal

    root = options.directory or Path(tempfile.mkdtemp(prefix="forge-rehearse-"))
    wanted = verdicts.Wanted(
        times=options.times,
        seed=options.seed,
        signals=options.signals,
        tolerance=options.tolerance,
    )
    children.adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the script, too
    try:
        rehearsal = Rehearsal(command, root.absolute(), options.timeout_s, terminal.show)
        code = verdicts.RehearsalVerdict(rehearsal, wanted).rehearse()
    except KeyboardInterrupt:
        processes.kill_descendants()  # a script that was just being started
        code = int(ExitCode.INTERRUPTED)
    if code == verdicts.IDENTICAL and options.directory is None:
        shutil.rmtree(root)
    else:
        terminal.say(f"The files of all runs are in {root}")
    return code
