"""The Hydra callback that comes with every preset: a job keeps the config it began with.

At its first start a job's config is stored, resolved, in its directory. Whoever starts the job
there again gets that config, whatever has happened to the files since; overrides that contradict
it are refused. The policy is checked here too, before the user's main builds anything.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from forge import config, hints, job_dir, messages, stopping
from forge.errors import ConfigError, ExitCode
from forge.ledger import forge_dir

_STORABLE = (str, bytes, int, float, bool, Enum, Path, DictConfig, ListConfig, type(None))


class JobConfig(Callback):
    """Freezes and restores a job's config. Named by `conf/forge/hooks/hydra.yaml`."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a single job: bring back the config it was first started with."""
        hints.composition_succeeded()
        directory = _run_dir(config)
        if directory is not None and (forge_dir(directory) / "config.yaml").exists():
            _restore(config, directory)
        else:
            with read_write(config):
                _resolve_now(config, is_root=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After a sweep: every job was composed, here or where it ran."""
        hints.composition_succeeded()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """In the job's process, before the user's main."""
        hints.composition_succeeded()
        directory = Path(config.hydra.runtime.output_dir)
        policy = _checked_policy(config)
        if policy is None or not policy.enabled:
            return
        _freeze(config, directory)
        stopping.install(policy, forge_dir(directory))
        command = job_dir.resume_command(directory)

        def tell(name: str, code: int) -> None:
            messages.say(
                f"{name} before training began: nothing to save. To start again:\n  {command}"
            )

        stopping.on_unsaved_stop(tell)


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


def _resolve_now(node: Any, is_root: bool = False) -> None:
    """Replace interpolations by their values, so that main and the stored config see the same.

    `${now:…}` and the like give another value each time somebody asks. What refers to Hydra's own
    config is left: parts of it are not known yet, and it is the same at every start.
    """
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if is_root and key == "hydra":
            continue
        child = node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            if "hydra:" not in str(child._value()) and "hydra." not in str(child._value()):
                with contextlib.suppress(OmegaConfBaseException):  # reported where it is read
                    value = node[key]
                    if isinstance(value, _STORABLE):  # an object would come back as its name
                        node[key] = value
        elif isinstance(child, (DictConfig, ListConfig)) and not (
            child._is_none() or child._is_missing()
        ):
            _resolve_now(child)


def _task_config(cfg: DictConfig) -> dict[str, Any]:
    """The user's part of the config, resolved."""
    with read_write(cfg):
        copied = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        container = OmegaConf.to_container(copied, resolve=True)
    except OmegaConfBaseException as error:
        # An interpolation that nobody may ever read: left as it is.
        messages.warn(f"The stored config keeps its interpolations, since one fails: {error}")
        container = OmegaConf.to_container(copied, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _freeze(cfg: DictConfig, directory: Path) -> None:
    path = forge_dir(directory) / "config.yaml"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    overrides = OmegaConf.to_yaml(cfg.hydra.overrides.task)
    job_dir.write_atomically(forge_dir(directory) / "overrides.yaml", overrides)
    job_dir.write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(_task_config(cfg))))


def _restore(cfg: DictConfig, directory: Path) -> None:
    stored = OmegaConf.load(forge_dir(directory) / "config.yaml")
    assert isinstance(stored, DictConfig)
    path = forge_dir(directory) / "overrides.yaml"
    first_overrides = _overrides_in(path)
    before = _flat(_as_stored(cfg))
    after = _flat(OmegaConf.to_container(stored, resolve=False))
    new = [o for o in cfg.hydra.overrides.task if o not in first_overrides]
    refused = [o for o in new if _contradicts(o, cfg, stored)]
    if refused:
        _refuse(
            f"{directory} holds a job that was started with another config; given now:"
            f" {' '.join(refused)}.\nTo go on with the job as it is, leave that out:"
            f" hydra.run.dir={directory}\nTo train with it, start in a new directory."
        )
    overridden = tuple(_key(override) for override in first_overrides)
    changed = sorted(
        key
        for key in before
        if "${" not in str(before[key])
        and before[key] != after.get(key, "")
        and not f"{key}.".startswith(tuple(f"{one}." for one in overridden))
    )
    if changed:
        shown = ", ".join(f"{k}={after.get(k, 'unset')} (now {before[k]})" for k in changed[:5])
        messages.warn(
            f"This job goes on with the config it was first started with ({directory}); config"
            f" files have changed since: {shown}"
        )
    with read_write(cfg), open_dict(cfg):
        _overlay(cfg, stored, is_root=True)


def _overlay(node: Any, stored: Any, is_root: bool = False) -> None:
    """Make `node` hold what is stored, keeping the types that its schema gives it."""
    for key in [key for key in node if key not in stored and not (is_root and key == "hydra")]:
        del node[key]
    for key in stored:
        wanted = stored._get_node(key)
        present = node._get_node(key)
        if _is_plain_dict(wanted) and _is_plain_dict(present):
            _overlay(present, wanted)
            continue
        try:
            node[key] = OmegaConf.to_container(wanted) if _is_plain_dict(wanted) else wanted
        except OmegaConfBaseException:
            messages.warn(f"The stored `{key}` no longer fits its schema; the stored value is used")
            del node[key]
            node[key] = wanted


def _is_plain_dict(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (
        node._is_none() or node._is_missing() or node._is_interpolation()
    )


def _overrides_in(path: Path) -> list[str]:
    if not path.exists():
        return []
    # Unresolved: an override may hold an interpolation of the config it was given to.
    typed: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return [str(one) for one in typed]


def _contradicts(override: str, cfg: DictConfig, stored: DictConfig) -> bool:
    """Whether a command-line override asks for something else than what is stored."""
    key = _key(override)
    wanted = OmegaConf.select(cfg, key, throw_on_missing=False)
    if isinstance(wanted, Enum):
        wanted = wanted.name  # as it is stored
    return bool(OmegaConf.create({"v": wanted}) != OmegaConf.create({"v": _select(stored, key)}))


def _key(override: str) -> str:
    """The key that a command-line override sets; a group's name for a choice of a group."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".")


def _select(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_missing=False)


def _as_stored(cfg: DictConfig) -> Any:
    """The user's part of a config as it would be read back from its file."""
    with read_write(cfg):
        copied = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(copied)), resolve=False)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


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
