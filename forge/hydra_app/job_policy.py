"""The policy of a job, from its composed config."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

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
