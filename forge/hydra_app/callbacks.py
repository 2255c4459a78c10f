"""The Hydra callback that every preset adds: a job keeps the config of its first start.

At the first start the job's resolved config is stored in its directory. A later start in that
directory uses the stored config, even if config files have changed since; overrides that contradict
it are refused. The callback also checks the policy, before the user's main builds anything.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from forge import messages
from forge.checkpoint.fence import Fence
from forge.compat import of_omegaconf
from forge.errors import ConfigError, DirectoryInUse, ExitCode, ForgeError
from forge.filesystem.files import make_directory
from forge.hydra_app import frozen, hints
from forge.hydra_app.job_policy import policy_of
from forge.jobdir import identity, job_dir, plan
from forge.jobdir.job_files import REHEARSAL, forge_dir
from forge.process import world
from forge.shutdown import stopping
from forge.slurm import batch_job, same_dir

_Hook = Callable[..., None]

if_no_launcher: list[str] = []
"""The command to exec if the config chooses no launcher; empty: keep Hydra's default."""

_claims: dict[Path, Fence] = {}
"""The directories of jobs of this process that it has locked."""


def _guarded(hook: _Hook) -> _Hook:
    """End the process if the hook fails: Hydra would only warn, and train."""

    @functools.wraps(hook)
    def call(self: Callback, config: DictConfig, **kwargs: Any) -> None:
        try:
            hook(self, config, **kwargs)
        except DirectoryInUse as error:
            _refuse(str(error), ExitCode.IN_USE)
        except ForgeError as error:
            _refuse(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, something was not checked
            shown = "".join(traceback.format_exception(error))
            _refuse(f"forge's {hook.__name__} failed, so the job is not run:\n{shown}")

    return call


class JobConfig(Callback):
    """Stores and restores a job's config. Named by `conf/forge/hooks/hydra.yaml`."""

    _written: dict[str, Any] | None = None
    """The unresolved config, if this process has composed it."""

    @_guarded
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a single job: restore the config of its first start."""
        hints.composition_succeeded()
        if REHEARSAL in os.environ:
            with read_write(config), open_dict(config):
                config.hydra.run.dir = os.environ[REHEARSAL]
        _keep_place(config.hydra.run)
        with _placed(config) as directory:
            if directory is None:
                return
            if OmegaConf.select(config, "resilience.enabled", throw_on_resolution_failure=False):
                _claim(directory)
            self._written = identity.as_written(config)
            if frozen.is_frozen(directory) and not frozen.wants_change(config):
                frozen.restore(config, directory)
            with read_write(config):
                frozen.resolve_now(config, directory)

    @_guarded
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a sweep."""
        if REHEARSAL in os.environ:
            _refuse(
                "A rehearsal runs a single job: remove -m (and hydra/launcher) from its command."
            )
        if if_no_launcher and config.hydra.launcher._target_.endswith(".BasicLauncher"):
            os.execv(if_no_launcher[0], if_no_launcher)  # the launcher cannot be changed any more
        _keep_place(config.hydra.sweep)
        try:
            os.makedirs(str(config.hydra.sweep.dir), exist_ok=True)  # Hydra does the same next
        except OSError as error:
            _refuse(
                f"`hydra.sweep.dir={config.hydra.sweep.dir}` cannot be created: {error}. Choose"
                " another directory."
            )

    @_guarded
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After a sweep: every job's config was composed, here or in its own process."""
        hints.composition_succeeded()

    @_guarded
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """In the job's process, before the user's main."""
        hints.composition_succeeded()
        directory = Path(config.hydra.runtime.output_dir)
        policy = policy_of(config)
        if policy is None or not policy.enabled:
            return
        _claim(directory)
        written = self._written
        if written is None:
            written = plan.read_earlier(directory).written or identity.as_written(config)
        frozen.freeze(config, directory, written)
        frozen.keep_policy(config, directory)
        stopping.install(policy, forge_dir(directory))
        command = job_dir.resume_command(directory)
        stopping.offer_requeuer(batch_job.of_run)
        is_judged = stopping.requeuer(policy, directory) is not None or job_dir.is_supervised()

        def tell(name: str, code: int) -> None:
            text = f"{name} arrived before training began: there is nothing to save."
            if not is_judged:
                text += f" To start again:\n  {command}"
            messages.say(text)

        stopping.on_unsaved_stop(tell)

    @_guarded
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """In the job's process, after the user's main."""
        directory = Path(config.hydra.runtime.output_dir)
        if directory in _claims:  # the next job of this process can be in the same directory
            _claims.pop(directory).release()


class NotHere(Callback):
    """Refuses a single run if a cluster launcher was chosen; named by the launcher's config."""

    @_guarded
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Without `-m` Hydra ignores the launcher: main would train on this machine."""
        words = [sys.argv[0], "-m", "hydra/launcher=slurm", *frozen.overrides_of(config)]
        _refuse(
            f"`hydra/launcher=slurm` without -m: Hydra would ignore the launcher and run"
            f" {config.hydra.job.name} here, on this machine. Add -m to submit it, even for a"
            " single job; remove the launcher to run it here:\n"
            f"  python {' '.join(map(job_dir.shell_word, words))}"
        )


def _claim(directory: Path) -> None:
    """Keep other starts out of the job's directory, before anything is written there.

    Otherwise two that start at once, such as tasks of an array, mix their configs and states. If
    there is a wrapper, it has locked the directory; of several ranks, rank 0 does.
    """
    if job_dir.is_supervised() or directory in _claims or world.of(os.environ).rank:
        return
    try:
        make_directory(forge_dir(directory))
        _claims[directory] = Fence(forge_dir(directory))
    except OSError as error:
        problem = f"`hydra.run.dir={directory}` cannot be written: {error}. Choose another one."
        raise ConfigError([problem], "The job's directory") from error


def _keep_place(node: Any) -> None:
    """Let a job that Slurm has requeued continue in its directory."""
    found = same_dir.of_start_before(str(of_omegaconf.value_of(of_omegaconf.child_of(node, "dir"))))
    if found is not None:
        with read_write(node):
            node.dir = found


@contextmanager
def _placed(cfg: DictConfig) -> Iterator[Path | None]:
    """The directory in which the job will run; None if Hydra cannot compute it."""
    outer = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(cfg)  # hydra.run.dir can contain `${hydra:…}`
        try:
            directory = os.path.abspath(str(OmegaConf.select(cfg, "hydra.run.dir")))
        except OmegaConfBaseException:
            yield None  # Hydra itself reports the error next
            return
        runtimes: list[Any] = [cfg.hydra.runtime, HydraConfig.get().runtime]
        for runtime in runtimes:
            with read_write(runtime), open_dict(runtime):
                runtime.output_dir = directory
        yield Path(directory)
    finally:
        HydraConfig.instance().cfg = outer


def _refuse(text: str, code: ExitCode = ExitCode.BAD_CONFIG) -> NoReturn:
    """End the process; Hydra would turn any exception of a callback into a warning."""
    hints.composition_succeeded()  # the text says what to do: no hint for Hydra's errors follows
    messages.say(text, logging.ERROR)
    sys.exit(int(code))
