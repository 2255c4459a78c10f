"""Common to all commands about sweeps: the argument that names a sweep, errors, the output."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable

from forge import messages
from forge.errors import NoSweep, Untrusted
from forge.filesystem.files import check_trusted
from forge.jobdir.job_files import forge_dir
from forge.sweeps import find, queue, sweep
from forge.sweeps.job import SweepJob
from forge.sweeps.render import Line
from forge.sweeps.sweep import Sweep

WHERE = "directory of a sweep or a run, or a Slurm job id (default: the newest one here)"
JOBS = (
    "a job, by its number, its overrides (lr=0.1,seed=2), its Slurm id or its directory; before it,"
    " if it is not in the newest sweep here, the directory of the sweep"
)
_WIDTH = 78
USAGE = 2
"""Exit code if there is no such sweep or job, or if a file of it cannot be used."""


def parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a command, with its examples below its options."""
    return argparse.ArgumentParser(
        prog=f"forge {name}",
        description=textwrap.fill(" ".join(description.split()), _WIDTH),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(command: Callable[[], int]) -> int:
    """Run a command; if there is no such sweep or job, or a file of it cannot be used, print that.

    Returns:
        The command's exit code, or 2; 78 if another user could have written the files.
    """
    code = USAGE
    try:
        return command()
    except NoSweep as error:
        text = str(error)
    except Untrusted as error:
        text, code = str(error).removesuffix("."), int(error.exit_code)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    sys.stderr.write(messages.escape(f"forge: {text}.\n", "\n"))
    return code


def read(wanted: str | None) -> tuple[Sweep, list[SweepJob]]:
    """The sweep that an argument names, and the jobs in it that are meant.

    Raises:
        NoSweep: If there is none.
    """
    found = find.find(wanted)
    whole = queue.asked(sweep.sweep(found.path))
    return whole, [whole.find(found.job)] if found.job else list(whole.jobs)


def pick(words: list[str], *, is_own: bool = False) -> tuple[Sweep, list[SweepJob], bool]:
    """The sweep and the jobs that `[SWEEP] [JOB …]` name.

    Args:
        words: The arguments.
        is_own: Whether the command acts on the jobs, which other users must not decide.
    Returns:
        The sweep, the jobs (all, if none is named), and whether jobs are named.
    Raises:
        NoSweep: If there is no such sweep or job.
        Untrusted: With `is_own`, if another user could have written the files of one.
    """
    first = words[0] if words else None
    if first is not None and (find.existing(first) or not _is_here(first, is_own=is_own)):
        found = find.find(first)
        names = [*([found.job] if found.job else []), *words[1:]]
    else:
        found = find.find(None, is_own=is_own)
        names = words or [found.job] * bool(found.job)
    whole = queue.asked(sweep.sweep(found.path))
    named = {job.number: job for job in map(whole.find, names)}
    jobs = list(named.values()) if names else list(whole.jobs)
    for directory in (whole.path, *(job.directory for job in jobs)) if is_own else ():
        with contextlib.suppress(FileNotFoundError):  # a job that has not started yet
            check_trusted(forge_dir(directory))
    return whole, jobs, bool(names)


def _is_here(word: str, *, is_own: bool) -> bool:
    """Whether a word names a job of the sweep that is found without an argument.

    Raises:
        NoSweep: If the word can name nothing else, and names no job or several.
    """
    try:
        whole = sweep.sweep(find.find(None, is_own=is_own).path)
    except NoSweep:
        return False
    try:
        whole.find(word)
    except NoSweep:
        if "=" not in word and (os.sep in word or find.is_slurm_id(word)):
            return False
        raise
    return True


def width() -> int | None:
    """Columns of the terminal; None if the output is a pipe or a file."""
    return shutil.get_terminal_size((80, 0)).columns if sys.stdout.isatty() else None


def output(lines: Iterable[Line | str]) -> int:
    """Print lines, in colour on a terminal; returns 0. The reader of a pipe can leave early."""
    print_lines(lines)
    return 0


def print_lines(lines: Iterable[Line | str]) -> bool:
    """Print lines as `output` does; returns whether the reader of a pipe is still there."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    try:
        if is_plain:
            for line in lines:
                sys.stdout.write(f"{line if isinstance(line, str) else line.text}\n")
        else:
            from rich.console import Console
            from rich.text import Text

            console = Console(soft_wrap=True, highlight=False)
            for line in lines:
                text = Text(line) if isinstance(line, str) else Text(line.text, line.style)
                console.print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
