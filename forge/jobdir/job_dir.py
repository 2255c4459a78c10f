"""A job's own directory: its frozen config, fingerprint of the code, and how to resume it.

    <job dir>/.forge/config.yaml     the config the job was first started with
    <job dir>/.forge/start.yaml      its program, and the overrides it was given
    <job dir>/.forge/code.json       sha256 of each source file the job had imported
    <job dir>/.forge/threads.json    how many threads torch used at the first start, and who said so
    <job dir>/.forge/resume.sh       its last line resumes the job, wherever the directory lies now

Under Hydra the job's directory is Hydra's output directory, else the checkpoint directory, unless
whoever started this process has placed it elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from forge.config.schema import CheckpointConfig
from forge.errors import ConfigError, ExitCode, ForgeError
from forge.filesystem.files import make_directory, read_trusted, write_atomically
from forge.jobdir import spawned
from forge.jobdir.job_files import CODE, REHEARSAL, RESUME, TOKEN, forge_dir, read_json, write_json
from forge.jobdir.spawned import Inherited
from forge.jobdir.start_dir import START_DIR

_THREADS = "threads.json"


def hydra_config() -> Any | None:
    """Hydra's own config of the job that runs in this process, or None outside Hydra."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


_placed: list[tuple[Path, str]] = []


def place(directory: Path, command: str) -> None:
    """From now on this process's job lies in `directory`, and is resumed by `command`."""
    _placed[:] = [(directory.absolute(), command)]
    spawned.hand_on(Inherited(directory.absolute(), command, Path.cwd()))


def current(checkpoint_dir: str, name: str | None = None) -> tuple[Path, Path]:
    """(job directory, checkpoint directory of the Run of this name); both absolute.

    Raises:
        ConfigError: Where this process cannot tell which job of a sweep it belongs to.
    """
    hydra, job_of_parent = hydra_config(), spawned.inherited()
    rehearsal = os.environ.get(REHEARSAL)
    if rehearsal is not None:  # also what has a place of its own lies in there
        job, checkpoint_dir = Path(rehearsal), checkpoint_dir.lstrip(os.sep)
    elif _placed:
        job = _placed[0][0]
    elif hydra is not None and hydra.runtime.output_dir is not None:
        job = Path(hydra.runtime.output_dir)
    elif job_of_parent is not None:
        job = job_of_parent.directory
    elif TOKEN in os.environ and not Path(checkpoint_dir).is_absolute():
        raise ConfigError(
            [
                "a job of a sweep has started this program, which has no Hydra config and is no"
                " child that the job's own script started by multiprocessing. So it cannot tell"
                f" which job it belongs to, and `checkpoint.dir={checkpoint_dir}` would be the same"
                " directory for all of them. Give it an absolute `checkpoint.dir`."
            ],
            "This Run",
        )
    else:
        job = Path(checkpoint_dir).absolute()
        checkpoint_dir = "."
    return job, job / checkpoint_dir / (name or "")


def checkpoint_dir(job_dir: Path) -> Path | None:
    """Where the job that lies in `job_dir` keeps its checkpoints; None where nothing says so."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from forge.jobdir import config_file

    try:
        tree = config_file.read(forge_dir(job_dir) / "config.yaml", is_executed=False)
        section = tree["resilience"]["checkpoint"]
        # Hydra, whose words these are, does not run here.
        section["dir"] = section["dir"].replace("${hydra:runtime.output_dir}", str(job_dir))
        found = OmegaConf.select(OmegaConf.create(tree), "resilience.checkpoint.dir")
        return Path(job_dir, found)
    except (OSError, ForgeError, LookupError, AttributeError, TypeError, OmegaConfBaseException):
        return None


def started_in() -> Path:
    """The directory in which the command was given: what its relative paths are relative to."""
    hydra, job_of_parent = hydra_config(), spawned.inherited()
    if hydra is None and job_of_parent is not None:
        return job_of_parent.started_in
    return Path(hydra.runtime.cwd) if hydra is not None else Path.cwd()


def init_problem(checkpoint: CheckpointConfig, job: Path, started_in: Path) -> str | None:
    """Why the job in this directory could not begin as `checkpoint.init_from` says, or None.

    A job that has checkpoints of its own resumes from those, whatever has become of that file.
    """
    if checkpoint.init_from is None:
        return None
    source, own = started_in / checkpoint.init_from, job / checkpoint.dir
    if source.exists() or any(own.glob("step_*")) or any(own.glob("*/step_*")):  # of a named Run
        return None
    return (
        f"`resilience.checkpoint.init_from={checkpoint.init_from}`: there is nothing at {source}. A"
        f" relative path begins where the command is started. Correct it, or set it to null."
    )


# -- the command that resumes ------------------------------------------------------------------


def resume_command(job_dir: Path) -> str:
    """One shell line that resumes this job, from any directory."""
    for _, command in _placed:
        return command
    hydra, job_of_parent = hydra_config(), spawned.inherited()
    if hydra is None and job_of_parent is not None:
        return job_of_parent.command
    program, arguments = _command_line()
    if hydra is not None:
        arguments = _hydra_arguments(hydra, job_dir, arguments)
    threads = [f"{name}={value}" for name, value in _thread_variables(job_dir).items()]
    return _line([*(["env", *threads] if threads else []), *program, *arguments])


def taking_command(job_dir: Path) -> str | None:
    """One shell line that takes on what has changed; None if a job of submitit's has no such."""
    command = resume_command(job_dir)
    there = _there(command)
    if not there:
        return None
    return f"{there}env {RESUME}=changed {command.removeprefix(there).removeprefix('env ')}"


def _there(command: str) -> str:
    """How a command begins that was made by `_line`; empty for another (`scontrol requeue 7`)."""
    found = re.match(f"cd {_WORD} && ", command)
    return found[0] if found else ""


def is_supervised() -> bool:
    """Whether somebody else starts this job again: one of forge's launchers, or submitit."""
    return bool(_placed) or TOKEN in os.environ


def sweep_command(sweep_dir: Path) -> str:
    """One shell line that resumes this sweep, from any directory."""
    program, arguments = _command_line()
    renewed = ("hydra.sweep.dir=", "hydra.launcher.wait=")  # whoever resumes wants to see the end
    kept = [one for one in arguments if not one.lstrip("+~").startswith(renewed)]
    kept = [one for one in kept if not _is_for_once(one)]
    # Beside the other overrides: argparse takes no two groups of them with an option between.
    kept.insert(_first_override(kept), f"hydra.sweep.dir={hydra_quoted(str(sweep_dir))}")
    return _line([*program, *kept])


def _line(words: list[str]) -> str:
    return f"cd {shell_word(_start_dir())} && {' '.join(map(shell_word, words))}"


def shell_word(word: str) -> str:
    """The word for a line of any POSIX shell, without what a terminal would obey."""
    if word.isprintable() or word.endswith("\n"):  # which `$(…)` would drop
        return shlex.quote(word)
    spelled = "".join(
        c if c.isprintable() and c not in "-!'\"\\" else _octal(c) for c in word.replace("%", "%%")
    )
    return f"\"$(printf '{spelled}')\""


def _octal(letter: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(letter))


_WORD = r"""(?:'[^']*'|"[^"]*"|[^\s'"])+"""
"""One of `shell_word`."""


def _start_dir() -> str:
    """Where this process was started, wherever the script has gone since (`os.chdir`)."""
    script = sys.argv[0].removeprefix("./")
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    if script and not os.path.isabs(script) and path.endswith(os.sep + script):
        return path.removesuffix(script).rstrip(os.sep) or os.sep  # Python has made it absolute
    return START_DIR


def _command_line() -> tuple[list[str], list[str]]:
    """How this process was started: the program (`python -u train.py`), and its arguments."""
    arguments = sys.argv[1:]
    original = list(sys.orig_argv)
    count = len(arguments)
    is_spawned = spawned.parent() is not None and "-c" in original
    if is_spawned or (count and original[-count:] != arguments):
        return [sys.executable, sys.argv[0]], arguments  # sys.argv is not that of this process
    program = original[: len(original) - count]
    if os.sep not in program[0]:
        program[0] = sys.executable or program[0]  # `python` may be another one elsewhere
    return program, arguments


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
    # What places a job (its directory, sweep and launcher) is replaced by its directory alone.
    for override in as_typed(hydra.overrides.hydra):
        if not override.lstrip("+~").startswith(_PLACING):
            kept.append(override)
    kept.extend(o for o in as_typed(hydra.overrides.task) if not _is_for_once(o))
    return [*kept, f"hydra.run.dir={hydra_quoted(str(job_dir))}"]


def _is_for_once(override: str) -> bool:
    """What has changed was taken on by then; what changes later is not what was meant."""
    return override.lstrip("+").startswith("resilience.resume=")


def as_typed(overrides: Any) -> list[str]:
    """Overrides as they were typed: iterating the config would resolve their interpolations."""
    from omegaconf import OmegaConf

    typed: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(one) for one in typed]


def hydra_quoted(value: str, mark: str = "") -> str:
    """A value that Hydra's override grammar reads back as it is.

    `mark`: the quotation mark to put around it; empty: one where it needs any.
    """
    if not mark and all((c.isascii() and c.isalnum()) or c in "/-_.+:@%?*" for c in value):
        return value
    mark = mark or "'"
    # A backslash counts only before a quote, an interpolation, or the end.
    pattern = rf"(\\*)({mark}|$)"
    value = re.sub(pattern, lambda m: 2 * m[1] + (f"\\{mark}" if m[2] else ""), value)
    value = re.sub(r"(\\*)\$\{", lambda m: 2 * m[1] + r"\${", value)
    return f"{mark}{value}{mark}"


_QUOTING = r"""quoted=$(printf %s "$here" | sed -e "s/\\(\\\\*\\)'/\\1\\1\\\\'/g" \
  -e "s/\\(\\\\*\\)\$/\\1\\1/" -e "s/\\(\\\\*\\)\${/\\1\\1\\\\\${/g")"""
"""`hydra_quoted` in a shell's words."""


def write_resume_script(job_dir: Path, command: str) -> None:
    """Leave the command where people and programs find it.

    It resumes what lies where the script lies: a directory that was moved, or a copy, by itself.
    A job that says by itself where it lies cannot be given another place, and is refused elsewhere.
    The script becomes the program: a signal to its process reaches training, and not a shell.
    """
    head = _there(command)
    command = f"{head}exec {command.removeprefix(head)}"
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        placed = shell_word(f"{key}={hydra_quoted(str(job_dir))}")
        command = command.replace(placed, f"\"{key}='$quoted'\"")
    if "$quoted" in command:
        check = _QUOTING
    else:
        there = shlex.quote(os.path.realpath(job_dir))
        check = f"""there={there}
[ "$here" = "$there" ] || {{
  echo "forge: this run started in $there and is now in $here, but its program sets the path." >&2
  echo "Move it back, or start the program there with this as its directory." >&2
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
    """The number of torch's threads when the job was first started; None: nobody knows."""
    number = (read_json(forge_dir(job_dir) / _THREADS) or {}).get("torch")
    return number if isinstance(number, int) else None


def note_threads(job_dir: Path, number: int) -> None:
    """Remember the number of torch's threads, and what this environment says of it."""
    made = {name: os.environ[name] for name in _BY_ENVIRONMENT if name in os.environ}
    write_json(forge_dir(job_dir) / _THREADS, {"torch": number, "environment": made})


def _thread_variables(job_dir: Path) -> dict[str, str]:
    """What the environment said of threads at the first start, which may be this one."""
    noted = (read_json(forge_dir(job_dir) / _THREADS) or {}).get("environment")
    if isinstance(noted, dict):
        return {name: str(noted[name]) for name in _BY_ENVIRONMENT if name in noted}
    return {name: os.environ[name] for name in _BY_ENVIRONMENT if name in os.environ}


# -- the code ----------------------------------------------------------------------------------


def code_fingerprint() -> dict[str, str]:
    """sha256 of every imported source file that is the user's own, by absolute path."""
    roots = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = Path(__file__).parents[1]
    roots |= {*site.getsitepackages(), site.getusersitepackages(), str(ours)}
    roots.add(str(ours.parent / "hydra_plugins" / "forge_launcher"))  # in a repository
    installed = tuple(os.path.join(root, "") for root in roots)
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = os.path.abspath(file)
        if not path.startswith(installed):
            try:
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except OSError:
                continue  # removed since it was imported: there is nothing left to compare
    return found


def changed_code(job_dir: Path, now: dict[str, str] | None = None) -> list[str]:
    """Files that differ from those the job was first started with; the first start notes them.

    `now`: the code's fingerprint, where the caller has it for many jobs.
    """
    path = forge_dir(job_dir) / CODE
    now = code_fingerprint() if now is None else now
    try:
        first: dict[str, str] = dict(json.loads(read_trusted(path)))
    except (FileNotFoundError, ValueError):
        make_directory(path.parent)
        write_atomically(path, json.dumps(now, indent=1))
        return []
    return sorted(file for file, digest in first.items() if now.get(file, digest) != digest)


def forget_code(job_dir: Path) -> None:
    """Let the next start be the first."""
    (forge_dir(job_dir) / CODE).unlink(missing_ok=True)
