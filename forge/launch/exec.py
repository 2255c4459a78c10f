"""`forge exec`: any command as the task of a job, in place of a main function.

    forge exec [overrides] -- COMMAND…               the command is on the command line
    forge exec --config-name job -m lr=1e-3,1e-4     or in a config: `command: [python, train.py]`

It is a Hydra app, and the launchers start its jobs, which run a command instead of a function.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from forge import messages
from forge.errors import ConfigError, ExitCode
from forge.hydra_app import callbacks
from forge.jobdir import job_dir
from forge.jobdir.job_files import RANKS

_LINE = "command_line"
"""Key of the config for the arguments after `--`; the key `command` belongs to the user."""
_WITHOUT_JOBS = ("-m", "--multirun", "--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help")
_NAMING = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
_PLACES = ("--config-path", "-cp")
_WITH_VALUE = (*_NAMING, "--cfg", "-c", "--package", "-p")
_OPTION = "hydra.launcher."
_CONFIG = "forge_exec"
_WITHOUT_CONFIG = {
    "defaults": [{"resilience": "default"}, {"override hydra/launcher": "local"}, "_self_"],
    "command": None,
}
"""The config without `--config-name`: the command comes after `--`."""
_USAGE = """\
usage: forge exec [OVERRIDE ...] -- COMMAND ...
       forge exec --config-name NAME [-m] [OVERRIDE ...]
"""
_HELP = f"""\
{_USAGE}
Run any command as a job under the policy `resilience`: forge forwards stop
signals, enforces the time limit, restarts the command, and writes its logs.
Without `hydra/launcher=slurm` the command runs on this machine.

  OVERRIDE            a Hydra override: resilience.requeue.max_failures=3
  COMMAND ...         the command and its arguments
  --config-name NAME  a config that has the command as a list, which can
                      contain interpolations: `command: [python, a.py, ${{lr}}]`
  -m                  a sweep: one job for each combination of the overrides
  --cfg job           print the composed config (an option of Hydra, as is
                      `--hydra-help`)

Examples: forge exec -- python simulate.py --seed 1
          forge exec hydra/launcher=slurm -- python simulate.py
          forge exec --config-name job -m lr=1e-3,1e-4
"""
_USAGE_CODE = 2
"""Exit code if no command is named: argparse's code for wrong arguments."""


def main(arguments: list[str]) -> int:
    """Run `forge exec` with the arguments after its name; returns the exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_HELP)
        return 0
    if problem := _one_of_many(os.environ):
        messages.say(problem, logging.ERROR)
        return int(ExitCode.BAD_CONFIG)
    has_line = "--" in arguments
    typed = arguments[: arguments.index("--")] if has_line else arguments
    options, overrides = _separated(typed)
    if not arguments[len(typed) + 1 :] and _names_no_command(options, overrides):
        sys.stderr.write(f"{_USAGE}forge exec: error: expected a command after `--`, or a config\n")
        return _USAGE_CODE
    if has_line:
        words = arguments[len(typed) + 1 :]
        quoted = ",".join(job_dir.hydra_quoted(word, '"') for word in words)
        overrides.append(f"+{_LINE}=[{quoted}]")
    if not any(one.partition("=")[0] in _WITHOUT_JOBS for one in options):
        options.insert(0, "-m")
    given = [*options, *overrides]
    has_launcher = any(one.startswith("hydra/launcher=") for one in overrides)
    if not has_launcher:
        # `++` adds keys of a launcher that is chosen later; Hydra's default launcher lacks them.
        given = [f"++{one}" if one.startswith(_OPTION) else one for one in given]
    # As if the program were `forge exec`: the command that resumes is built from these two.
    program = [*sys.orig_argv[: 1 - len(sys.argv)], "exec"]
    if not has_launcher:
        callbacks.if_no_launcher = [
            *(sys.executable, *program[1:]),
            *(*options, "hydra/launcher=local", *overrides),
        ]
    if os.path.isabs(program[1]) and os.access(program[1], os.X_OK):
        del program[0]  # the installed script runs without naming Python
    sys.orig_argv[:] = [*program, *given]
    sys.argv[1:] = given
    return _run(given)


def _names_no_command(options: list[str], overrides: list[str]) -> bool:
    """Whether no config, override or Hydra option can contain the command."""
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    return set(options) <= {"-m", "--multirun"} and not keys & {"command", _LINE}


def _one_of_many(environment: Mapping[str, str]) -> str:
    """Why this srun task must not start the command: each task would, in the same directory."""
    number = environment.get("SLURM_STEP_NUM_TASKS") or "1"
    if number == "1" or environment.get(RANKS) == "1":
        return ""
    return (
        f"srun has started `forge exec` {number} times (SLURM_STEP_NUM_TASKS={number}, this is task"
        f" {environment.get('SLURM_PROCID')}), and each task would run the command as a separate"
        " job in the same directory. Start `forge exec` once, and let the command start the tasks:"
        f" `forge exec -- srun COMMAND…`; or start one task: `srun -n1 forge exec -- COMMAND…`. If"
        f" you want {number} jobs, give each its own directory: `srun bash -c '{RANKS}=1 forge exec"
        " hydra.sweep.dir=out/$SLURM_PROCID -- COMMAND…'`."
    )


def _separated(typed: list[str]) -> tuple[list[str], list[str]]:
    """(options, overrides): Hydra does not accept overrides on both sides of an option.

    --config-path becomes absolute, since Hydra would resolve it relative to this file.
    """
    options: list[str] = []
    overrides: list[str] = []
    before = ""
    for word in typed:
        name, _, value = word.partition("=")
        if before in _PLACES:
            word = os.path.abspath(word)
        elif name in _PLACES and value:
            word = f"{name}={os.path.abspath(value)}"
        is_option = word.startswith("-") or before in _WITH_VALUE
        (options if is_option else overrides).append(word)
        before = word
    return options, overrides


def _run(given: list[str]) -> int:
    import hydra
    from hydra.core.config_store import ConfigStore

    # Not a file of `conf`: every app's --help would list it.
    ConfigStore.instance().store(_CONFIG, _WITHOUT_CONFIG, provider="forge")
    version = {"version_base": None} if hydra.__version__ < "1.4" else {}
    has_config = any(one.partition("=")[0] in _NAMING for one in given)
    place = os.getcwd() if has_config else None
    hydra.main(**version, config_path=place, config_name=_CONFIG)(run)()
    return 0


def run(cfg: DictConfig) -> None:
    """The app's main for Hydra, which is only called under a launcher that is not forge's."""
    try:
        _check_policy(cfg)
        raise _problem(
            "`hydra/launcher`: expected local or slurm, found another launcher, which would ignore"
            " the policy. Add `hydra/launcher=local`; this is the default if the defaults list of"
            " the config has a preset, such as `resilience: default`."
        )
    except ConfigError as error:
        messages.say(str(error), logging.ERROR)
        sys.exit(int(ExitCode.BAD_CONFIG))


class ComposedCommand(NamedTuple):
    """The command that a job runs instead of a main function."""

    words: list[str]
    environment: dict[str, str]
    """`hydra.job.env_set`, which Hydra would set for a main function."""
    is_in_job_dir: bool
    """`hydra.job.chdir`: whether the command starts in the job's directory."""


def command_of(cfg: DictConfig) -> ComposedCommand:
    """The command in a job's composed config.

    Args:
        cfg: The job's config, with Hydra's own part.
    Raises:
        ConfigError: If the command or the policy is missing or wrong.
    """
    declared, line = _value(cfg, "command"), _value(cfg, _LINE)
    if declared is not None and line is not None:
        raise _problem(
            f"`command={_shown(declared)}`: the config has this command, and the command line has"
            f" another one after `--`: {_shown(line)}. Remove one of the two."
        )
    found, key = (declared, "command") if line is None else (line, "the command after --")
    if not found:
        raise _problem(
            f"`{key}`: expected a command, found none. Give it after `--`, as in `forge exec --"
            " python train.py`, or in the config that --config-name names: `command: [python,"
            " train.py]`."
        )
    if not isinstance(found, list):
        raise _problem(
            f"`command={found}`: expected a list of arguments, found {_kind(found)}. Write"
            f" `command: [{', '.join(str(found).split())}]`; for a shell command line,"
            f" `command: [bash, -c, {str(found)!r}]`."
        )
    for number, word in enumerate(found):
        if isinstance(word, list | dict) or word is None:
            raise _problem(
                f"`command[{number}]`: expected a text or a number, found {_kind(word)}. Write each"
                " argument as an item of its own, or remove the item."
            )
    words = [str(word) for word in found]
    _check_program(words[0], cfg)
    _check_policy(cfg)
    variables = {name: str(value) for name, value in cfg.hydra.job.env_set.items()}
    return ComposedCommand(words, variables, bool(cfg.hydra.job.chdir))


def _check_policy(cfg: DictConfig) -> None:
    if OmegaConf.select(cfg, "resilience") is None:
        raise _problem(
            "`resilience`: expected a policy, found none. Put a preset into the defaults list of"
            " the config, `defaults: [{resilience: default}, _self_]`; the preset `disabled` turns"
            " forge off."
        )


def _value(cfg: DictConfig, key: str) -> Any:
    is_open = key != _LINE  # on the command line, ??? is an ordinary argument
    try:
        value = OmegaConf.select(cfg, key, throw_on_missing=is_open)
        if isinstance(value, (ListConfig, DictConfig)):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=is_open)
    except MissingMandatoryValue:
        raise _problem(f"`{key}`: expected a value for each `???`, found none.") from None
    except OmegaConfBaseException as error:
        raise _problem(f"`{key}` cannot be resolved: {str(error).splitlines()[0]}") from error
    return value


def _check_program(name: str, cfg: DictConfig) -> None:
    """Raise ConfigError if the program is missing; a Slurm job can find it on its node alone."""
    launcher: Any = OmegaConf.select(cfg, "hydra.launcher")
    is_elsewhere = ".slurm." in str(launcher.get("_target_"))
    if is_elsewhere and (launcher.get("python") or os.sep not in name):
        return
    if cfg.hydra.job.chdir and os.sep in name and not os.path.isabs(name):
        raise _problem(
            f"`command[0]={name}`: expected an absolute path, since the command starts in the job's"
            f" directory (`hydra.job.chdir=true`). Write {os.path.abspath(name)}."
        )
    if shutil.which(name) is None:
        raise _problem(
            f"`command[0]={name}`: expected a program, found none of that name. Correct the name or"
            " the path. A script has to be executable (`chmod +x`), or to follow its interpreter:"
            f" `[bash, {name}]`."
        )


def _problem(text: str) -> ConfigError:
    return ConfigError([text], "The command")


def _kind(value: Any) -> str:
    names = {str: "a text", dict: "a group of keys", list: "a list", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list) else str(value)
