"""A policy from whatever the user gives: a mapping, Hydra's config, or nothing."""

from __future__ import annotations

import pickle
from typing import Any

from forge.config.schema import Policy


def load(policy: Any, *, time_limit_s: float | None = None, limit_key: str = "") -> Policy:
    """Check a policy and convert it.

    Args:
        policy: A `Policy`, a mapping, an OmegaConf config, or None for the defaults. Keys left
            out have their default.
        time_limit_s: The job's time limit in seconds, where there is one.
        limit_key: The config key and value that set it, for messages.
    Raises:
        ConfigError: With every problem found.
    """
    from forge.config.rules import convert, cross_field_problems
    from forge.errors import ConfigError

    shown = _shown(policy)
    known = _loaded.get((shown, time_limit_s)) if shown else None
    if known is not None:
        return pickle.loads(known)  # type: ignore[no-any-return]
    converted, problems = convert(policy)
    problems += cross_field_problems(converted, time_limit_s, limit_key)
    if problems:
        raise ConfigError(problems)
    if shown and len(_loaded) < _MOST_LOADED:
        _loaded[shown, time_limit_s] = pickle.dumps(converted)
    return converted


_MOST_LOADED = 100
_loaded: dict[tuple[str, float | None], bytes] = {}
"""Policies that were good, pickled, by their text: the jobs of a sweep mostly have the same."""


def plain(node: Any) -> Any:
    """What OmegaConf.to_container makes of a node, interpolations and all, and much faster."""
    from omegaconf import DictConfig, ListConfig

    def of(node: Any) -> Any:
        content = node._value()
        if isinstance(node, DictConfig) and isinstance(content, dict):
            return {key: of(child) for key, child in content.items()}
        if isinstance(node, ListConfig) and isinstance(content, list):
            return [of(child) for child in content]
        return content

    return of(node)


def _shown(policy: Any) -> str:
    """A config as a text that differs where the config differs; empty where there is none."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(policy, DictConfig):
        return ""
    text = repr(plain(policy))
    if "${" not in text:
        return text
    try:
        return repr(OmegaConf.to_container(policy, resolve=True))
    except OmegaConfBaseException:
        return ""
