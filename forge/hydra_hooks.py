"""The Hydra callback that comes with every preset: a job keeps the config it began with.

At its first start a job's config is stored, resolved, in its directory. Whoever starts the job
there again gets that config, whatever has happened to the files since; overrides that contradict
it are refused. The policy is checked here too, before the user's main builds anything.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from forge import config, frozen, hints, job_dir, messages, spawned, stopping, verdict
from forge.errors import ConfigError, ExitCode
from forge.job_files import REHEARSAL, forge_dir


class JobConfig(Callback):
    """Freezes and restores a job's config. Named by `conf/forge/hooks/hydra.yaml`."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a single job: bring back the config it was first started with."""
        hints.composition_succeeded()
        if REHEARSAL in os.environ:
            with read_write(config), open_dict(config):
                config.hydra.run.dir = os.environ[REHEARSAL]
        directory = _run_dir(config)
        if directory is not None and frozen.is_frozen(directory):
            try:
                frozen.restore(config, directory)
            except frozen.Contradiction as error:
                _refuse(str(error))
        else:
            with read_write(config):
                frozen.resolve_now(config, is_root=True)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a sweep."""
        if REHEARSAL in os.environ:
            _refuse(
                "A rehearsal is of one job: leave out -m (and hydra/launcher) from its command."
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After a sweep: every job was composed, here or where it ran."""
        hints.composition_succeeded()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """In the job's process, before the user's main."""
        hints.composition_succeeded()
        directory = Path(config.hydra.runtime.output_dir)
        policy = _checked_policy(config)
        spawned.hand_on(None)  # what is there is of the process that started us
        if policy is None or not policy.enabled:
            return
        problem = job_dir.init_problem(policy.checkpoint, directory, Path(config.hydra.runtime.cwd))
        if problem:
            _refuse(str(ConfigError([problem])))
        frozen.freeze(config, directory)
        frozen.keep_policy(config, directory)
        stopping.install(policy, forge_dir(directory))
        stopping.has_job(directory)
        command = job_dir.resume_command(directory)
        spawned.hand_on(spawned.Inherited(directory, command, Path(config.hydra.runtime.cwd)))

        def tell(name: str, code: int) -> None:
            messages.say(
                f"{name} before training began: nothing to save. To start again:\n  {command}"
            )

        stopping.on_unsaved_stop(tell)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """In the job's process, after the user's main: a child's stop is a stop of the job."""
        code = verdict.of_child(Path(config.hydra.runtime.output_dir))
        if code:
            sys.exit(code)


class NotHere(Callback):
    """Refuses a single run where the cluster was chosen; named by the launcher's config."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra ignores the launcher without `-m`: main would train right here."""
        typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        overrides = " ".join(typed)
        _refuse(
            f"`hydra/launcher=slurm` without -m: Hydra would run {config.hydra.job.name} right"
            " here, on this machine, and ignore the launcher. Add -m to submit it, also where it is"
            " a single job; leave the launcher out to run it here:\n"
            f"  python {sys.argv[0]} -m hydra/launcher=slurm {overrides}".rstrip()
        )


def _run_dir(cfg: DictConfig) -> Path | None:
    """Where the job is going to run; Hydra makes the directory later."""
    outer = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)  # `${hydra:…}` in hydra.run.dir reads it
    try:
        return Path(str(OmegaConf.select(cfg, "hydra.run.dir"))).absolute()
    except OmegaConfBaseException:
        return None  # Hydra reports it, in its own words, in a moment
    finally:
        HydraConfig.instance().cfg = outer


def _checked_policy(cfg: DictConfig) -> config.Policy | None:
    section = OmegaConf.select(cfg, "resilience")
    if section is None:
        return None
    limit_min = OmegaConf.select(cfg, "hydra.launcher.timeout_min")
    try:
        return config.load(
            section,
            time_limit_s=None if limit_min is None else 60.0 * limit_min,
            limit_key=f"hydra.launcher.timeout_min={limit_min}",
        )
    except ConfigError as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    """End the process; Hydra would turn any exception of a callback into a warning."""
    messages.say(text, logging.ERROR)
    sys.exit(int(ExitCode.BAD_CONFIG))
