"""The policy of a job, from its composed config, checked against the time limit of its launcher."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.config import loading
from forge.config.schema import Policy

_LIMIT, _OWN_LIMIT = "hydra.launcher.timeout_min", "resilience.slurm.timeout_min"


def policy_of(cfg: DictConfig, *, is_command: bool = False) -> Policy | None:
    """The policy; None if the config has none. `is_command`: for a command of `forge exec`.

    Raises:
        ConfigError: Lists all problems.
    """
    section = OmegaConf.select(cfg, "resilience")
    if section is None:
        return None
    limit_s, limit_key = _limit(cfg)
    return loading.load(section, time_limit_s=limit_s, limit_key=limit_key, is_command=is_command)


def _limit(cfg: DictConfig) -> tuple[float | None, str]:
    """The time limit in seconds, None without one; its key and value."""
    is_on_slurm = ".forge_launcher.slurm." in str(OmegaConf.select(cfg, "hydra.launcher._target_"))
    key = _OWN_LIMIT if is_on_slurm and OmegaConf.select(cfg, _OWN_LIMIT) else _LIMIT
    limit_min = OmegaConf.select(cfg, key)
    is_limit = isinstance(limit_min, int | float)  # the schema reports any other value
    limit_s = 60.0 * limit_min if is_limit else None
    return limit_s, f"{key}={limit_min}"


class Policies:
    """The policies of many jobs, of which most are equal: each is converted and checked once."""

    def __init__(self) -> None:
        self._checked: dict[str, Policy | None] = {}

    def of(self, cfg: DictConfig, *, is_command: bool = False) -> Policy | None:
        """As `policy_of`; equal policies are the same object."""
        section: Any = OmegaConf.select(cfg, "resilience")
        if not isinstance(section, DictConfig):
            return policy_of(cfg, is_command=is_command)
        try:
            values = OmegaConf.to_container(section, resolve=True)
        except OmegaConfBaseException:
            return policy_of(cfg, is_command=is_command)  # has the message for it
        key = repr((values, _limit(cfg), is_command))  # of 1, 1.0 and true, only one can be valid
        if key not in self._checked:
            self._checked[key] = policy_of(cfg, is_command=is_command)
        return self._checked[key]
