"""A job's own directory, and the command that resumes the job.

    <job dir>/.forge/config.yaml     the config the job was first started with
    <job dir>/.forge/start.yaml      its program and overrides
    <job dir>/.forge/threads.json    torch's number of threads at the first start, and its source
    <job dir>/.forge/resume.sh       resumes the job, also if the directory was moved

Under Hydra the job's directory is Hydra's output directory, else the checkpoint directory; a
launcher can choose another one.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, ExitCode
from forge.filesystem.files import make_directory, write_atomically
from forge.jobdir import START_DIR
from forge.jobdir.job_files import REHEARSAL, RESUME, TOKEN, forge_dir, read_json, write_json

_THREADS = "threads.json"


def hydra_config() -> Any | None:
    """Hydra's own config of the job that runs in this process, or None outside Hydra."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


_placed: list[tuple[Path, str]] = []


def set_directory(directory: Path, command: str) -> None:
    """Set the directory of this process's job, and the command that resumes it."""
    _placed[:] = [(directory.absolute(), command)]


def current(checkpoint_dir: str, name: str | None = None) -> tuple[Path, Path]:
    """(job directory, checkpoint directory of the Run of this name); both absolute.

    Raises:
        ConfigError: If this process does not know which job of a sweep it belongs to.
    """
    hydra = hydra_config()
    rehearsal = os.environ.get(REHEARSAL)
    if rehearsal is not None:  # even an absolute checkpoint directory is placed below it
        job, checkpoint_dir = Path(rehearsal), checkpoint_dir.lstrip(os.sep)
    elif _placed:
        job = _placed[0][0]
    elif hydra is not None and hydra.runtime.output_dir is not None:
        job = Path(hydra.runtime.output_dir)
    elif TOKEN in os.environ and not Path(checkpoint_dir).is_absolute():
        raise ConfigError(
            [
                "forge cannot tell which job of the sweep this program belongs to: the program was"
                f" started by a job, but it has no Hydra config. `checkpoint.dir={checkpoint_dir}`"
                " would be the same directory for all jobs. Give each job an absolute"
                " `checkpoint.dir` of its own."
            ],
            "This Run",
        )
    else:
        job = Path(checkpoint_dir).absolute()
        checkpoint_dir = "."
    return job, job / checkpoint_dir / (name or "")


# -- the command that resumes ------------------------------------------------------------------


def resume_command(job_dir: Path) -> str:
    """One shell line that resumes this job, from any directory; empty if no line can."""
    for _, command in _placed:
        return command
    hydra = hydra_config()
    if why_no_command():
        return ""
    program, arguments = _command_line()
    if hydra is not None:
        arguments = _hydra_arguments(hydra, job_dir, arguments)
    threads = [f"{name}={value}" for name, value in _thread_variables(job_dir).items()]
    return _line([*(["env", *threads] if threads else []), *program, *arguments])


def why_no_command() -> str:
    """Why no shell line can start the program of this process again; empty if one can."""
    if Path(sys.argv[0]).stem == "ipykernel_launcher":
        return "it runs in a notebook"
    return "its program was read from standard input" if sys.argv[0] in ("", "-") else ""


def taking_command(job_dir: Path) -> str | None:
    """One shell line that resumes with a changed config; None for a job of plain submitit."""
    command = resume_command(job_dir)
    there = _there(command)
    if not there:
        return None
    return f"{there}env {RESUME}=changed {command.removeprefix(there).removeprefix('env ')}"


def _there(command: str) -> str:
    """The `cd … && ` of a command made by `_line`; empty for others (`scontrol requeue 7`)."""
    found = re.match(f"cd {_WORD} && ", command)
    return found[0] if found else ""


def is_supervised() -> bool:
    """Whether a launcher of forge, or submitit, restarts this job."""
    return bool(_placed) or TOKEN in os.environ


def sweep_command(sweep_dir: Path) -> str:
    """One shell line that resumes this sweep, from any directory."""
    program, arguments = _command_line()
    renewed = ("hydra.sweep.dir=", "hydra.launcher.wait=")  # a resumed sweep waits for its jobs
    kept = [one for one in arguments if not one.lstrip("+~").startswith(renewed)]
    kept = [one for one in kept if not _is_for_once(one)]
    # Next to the other overrides: argparse does not accept an option between overrides.
    kept.insert(_first_override(kept), f"hydra.sweep.dir={hydra_quoted(str(sweep_dir))}")
    return _line([*program, *kept])


def _line(words: list[str]) -> str:
    return f"cd {shell_word(_start_dir())} && {' '.join(map(shell_word, words))}"


def shell_word(word: str) -> str:
    """Quote a word for any POSIX shell; control characters are escaped."""
    if word.isprintable() or word.endswith("\n"):  # `$(…)` would drop a final newline
        return shlex.quote(word)
    spelled = "".join(
        c if c.isprintable() and c not in "-!'\"\\" else _octal(c) for c in word.replace("%", "%%")
    )
    return f"\"$(printf '{spelled}')\""


def _octal(letter: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(letter))


_WORD = r"""(?:'[^']*'|"[^"]*"|[^\s'"])+"""
"""Matches a result of `shell_word`."""


def _start_dir() -> str:
    """The directory in which this process was started, even after an `os.chdir`."""
    script = sys.argv[0].removeprefix("./")
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    if script and not os.path.isabs(script) and path.endswith(os.sep + script):
        return path.removesuffix(script).rstrip(os.sep) or os.sep  # Python made `__file__` absolute
    return START_DIR


def _command_line() -> tuple[list[str], list[str]]:
    """(the program of this process, like `python -u train.py`; its arguments)."""
    arguments = sys.argv[1:]
    original = _torchrun() or list(sys.orig_argv)
    count = len(arguments)
    if count and original[-count:] != arguments:
        return [sys.executable, sys.argv[0]], arguments  # the script has replaced sys.argv
    program = original[: len(original) - count]
    if os.sep not in program[0]:
        program[0] = sys.executable or program[0]  # a later shell can find another `python`
    return program, arguments


def _torchrun() -> list[str]:
    """The command of torchrun, if this process is one of its ranks: it has to start all of them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:  # no /proc on macOS
        return []
    found = list(map(os.fsdecode, words))
    is_torchrun = any("torchrun" in word or "torch.distributed" in word for word in found)
    return found if is_torchrun else []


_PLACING = (
    "hydra.run.dir",
    "hydra.sweep.",
    "hydra.mode",
    "hydra/launcher",
    "hydra.launcher",
    "hydra/sweeper",
    "hydra.sweeper",
)
_KEPT_OPTIONS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")


def _first_override(arguments: list[str]) -> int:
    is_value = False
    for index, argument in enumerate(arguments):
        if not is_value and not argument.startswith("-"):
            return index
        is_value = argument in (*_KEPT_OPTIONS, "--package", "-p", "--experimental-rerun")
    return len(arguments)


def _hydra_arguments(hydra: Any, job_dir: Path, arguments: list[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, has_value, _ = argument.partition("=")
        if name in _KEPT_OPTIONS:
            kept.append(argument)
            if not has_value:
                kept.extend([value for value in [next(rest, None)] if value is not None])
    # Drop overrides of the directory, sweep and launcher: `hydra.run.dir` replaces them.
    for override in as_typed(hydra.overrides.hydra):
        if not override.lstrip("+~").startswith(_PLACING):
            kept.append(override)
    kept.extend(o for o in as_typed(hydra.overrides.task) if not _is_for_once(o))
    return [*kept, f"hydra.run.dir={hydra_quoted(str(job_dir))}"]


def _is_for_once(override: str) -> bool:
    """Whether it is `resilience.resume=`, which must not apply to later changes as well."""
    return override.lstrip("+").startswith("resilience.resume=")


def as_typed(overrides: Any) -> list[str]:
    """Overrides as they were typed: iterating the config would resolve interpolations."""
    from omegaconf import OmegaConf

    typed: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(one) for one in typed]


def hydra_quoted(value: str, mark: str = "") -> str:
    """Quote a value for Hydra's override grammar.

    `mark`: the quotation mark to use; empty: quote only if necessary.
    """
    if not mark and all((c.isascii() and c.isalnum()) or c in "/-_.+:@%?*" for c in value):
        return value
    mark = mark or "'"
    # A backslash is special only before a quote, an interpolation, or the end.
    pattern = rf"(\\*)({mark}|$)"
    value = re.sub(pattern, lambda m: 2 * m[1] + (f"\\{mark}" if m[2] else ""), value)
    value = re.sub(r"(\\*)\$\{", lambda m: 2 * m[1] + r"\${", value)
    return f"{mark}{value}{mark}"


QUOTING = r"""quoted=$(printf %s "$here" | sed -e "s/\\(\\\\*\\)'/\\1\\1\\\\'/g" \
  -e "s/\\(\\\\*\\)\$/\\1\\1/" -e "s/\\(\\\\*\\)\${/\\1\\1\\\\\${/g")"""
"""`hydra_quoted` as a shell command."""


def write_resume_script(job_dir: Path, command: str) -> None:
    """Write `.forge/resume.sh`, for people and programs.

    It resumes the job in the script's own directory, so that a moved or copied directory works. If
    the program sets its directory itself, the script refuses to run in another place. The script
    `exec`s the program, so that signals reach training and not a shell.
    """
    head = _there(command)
    command = f"{head}exec {command.removeprefix(head)}"
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        placed = shell_word(f"{key}={hydra_quoted(str(job_dir))}")
        command = command.replace(placed, f"\"{key}='$quoted'\"")
    if "$quoted" in command:
        check = QUOTING
    else:
        there = shlex.quote(os.path.realpath(job_dir))
        check = f"""there={there}
[ "$here" = "$there" ] || {{
  echo "forge: this run was started in $there, but its directory is now $here." >&2
  echo "Move it back, or start the program yourself, with $here as its output directory." >&2
  exit {int(ExitCode.BAD_CONFIG)}
}}"""
    path = forge_dir(job_dir) / "resume.sh"
    make_directory(path.parent)
    write_atomically(
        path,
        f"""#!/bin/sh
# Resumes the run in the directory above this file. Start it by its path.
here=$(cd "$(dirname "$0")/.." && pwd -P) || exit
[ -e "$here/.forge/resume.sh" ] || {{ echo "forge: start resume.sh by its path" >&2; exit 2; }}
{check}
{command}
""",
    )
    path.chmod(0o755)


# -- the number of threads ---------------------------------------------------------------------

_BY_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def first_threads(job_dir: Path) -> int | None:
    """torch's number of threads at the job's first start; None if it was not recorded."""
    number = (read_json(forge_dir(job_dir) / _THREADS) or {}).get("torch")
    return number if isinstance(number, int) else None


def note_threads(job_dir: Path, number: int) -> None:
    """Record torch's number of threads, and the environment variables that set it."""
    made = {name: os.environ[name] for name in _BY_ENVIRONMENT if name in os.environ}
    write_json(forge_dir(job_dir) / _THREADS, {"torch": number, "environment": made})


def _thread_variables(job_dir: Path) -> dict[str, str]:
    """The environment variables for threads at the first start, which can be this start."""
    noted = (read_json(forge_dir(job_dir) / _THREADS) or {}).get("environment")
    if isinstance(noted, dict):
        return {name: str(noted[name]) for name in _BY_ENVIRONMENT if name in noted}
    return {name: os.environ[name] for name in _BY_ENVIRONMENT if name in os.environ}
