"""The command line of `forge rehearse`."""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.errors import ExitCode
from forge.process import processes
from forge.rehearse import verdicts
from forge.rehearse.plan import SIGNALS, STEPS, STOPS, seconds_of, signals_of
from forge.rehearse.rehearsal import Rehearsal

_USAGE = "forge rehearse [--times N] [--seed S] [--signals TERM,KILL] [--within 20m] … -- COMMAND"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge rehearse", usage=_USAGE)
    parser.add_argument("--times", type=int, default=3, help="how many disturbed runs (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (default: 0)")
    names = ", ".join(one.removeprefix("SIG") for one in [*STOPS, "SIGKILL"])
    parser.add_argument(
        "--signals",
        type=_of(signals_of, f"expected some of {names}, with commas between them"),
        default=SIGNALS,
        help=f"which ones are drawn, of {names} (default: TERM,USR1,KILL)",
    )
    parser.add_argument(
        "--within",
        type=_of(seconds_of, "expected a time like 90s, 20m or 1h"),
        help="time for it all, like 20m: fewer disturbed runs where it is short, but one",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="to which each loop is shortened, its passes to a third of them; 0: to none"
        f" (default: {STEPS})",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="by how much numbers may differ, as a part of the largest in their tensor"
        " (default: 0, the same bits)",
    )
    parser.add_argument("--directory", type=Path, help="where runs go: a new one, which is kept")
    parser.add_argument("--timeout-s", type=float, help="limit of each start of the script")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python train.py …")
    return parser


def _of(convert: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: {expected}") from None

    return converted


def main(arguments: list[str]) -> int:
    """`forge rehearse`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or options.times < 1:
        parser.error("expected a command, and --times of at least 1")
    if options.steps < 0 or options.steps in (1, 2):
        parser.error(f"--steps {options.steps}: expected at least 3, or 0 for the whole training")
    if not 0 <= options.tolerance < 1:
        parser.error(f"--tolerance {options.tolerance:g}: expected at least 0, and less than 1")
    if options.directory is not None:
        try:
            options.directory.mkdir(parents=True)
        except OSError as error:
            parser.error(f"--directory {options.directory}: expected to make it: {error.strerror}")
    root = options.directory or Path(tempfile.mkdtemp(prefix="forge-rehearse-"))
    wanted = verdicts.Wanted(
        times=options.times,
        seed=options.seed,
        signals=options.signals,
        within_s=options.within,
        tolerance=options.tolerance,
        steps=options.steps,
    )
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the script, too
    try:
        rehearsal = Rehearsal(command, root.absolute(), options.timeout_s, options.steps)
        code = verdicts.Verdict(rehearsal, wanted).rehearse()
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    if code == 0 and options.directory is None:
        shutil.rmtree(root)
    else:
        verdicts.say(f"The runs are in {root}")
    return code
