"""Loads a policy from what the user gives: a mapping, Hydra's config, or None."""

from __future__ import annotations

from typing import Any

from forge.config.schema import Policy

_PREFIX = "resilience."
_KEYS = "docs/reference/policy.md"


def load(
    policy: Any,
    *,
    time_limit_s: float | None = None,
    limit_key: str = "",
    is_command: bool = False,
) -> Policy:
    """Check a policy and convert it.

    Args:
        policy: A `Policy`, a mapping, an OmegaConf config, or None for the defaults. Missing
            keys get their default.
        time_limit_s: The job's time limit in seconds, if it has one.
        limit_key: The config key and value of the time limit, for messages.
        is_command: Whether the policy is for a `forge exec` command, with its own exit codes.
    Returns:
        The policy.
    Raises:
        ConfigError: Lists all problems.
    """
    from forge.config.conversion import convert
    from forge.config.rules import cross_field_problems
    from forge.errors import ConfigError

    converted, problems = convert(policy)
    problems |= cross_field_problems(converted, time_limit_s, limit_key, is_command=is_command)
    if problems:
        raise ConfigError([*problems], page=_page({*problems.values()}))
    return converted


def _page(found: set[str]) -> str:
    """The page with all keys; of a single key, its row there."""
    from forge.config import keys

    known = [name for name, _, _ in keys.walk(Policy())]
    rows = {name for key in found for name in known if f"{key}.".startswith(f"{name}.")}
    return f"{_KEYS}#{rows.pop()}" if len(rows) == len(found) == 1 else _KEYS


def from_overrides(overrides: list[str]) -> Policy:
    """The default policy with these overrides, as on a command line.

    Args:
        overrides: For example `resilience.health.checks.shm=refuse`.
    Returns:
        The policy.
    Raises:
        ConfigError: Lists all problems.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from forge.errors import ConfigError

    bad = [one for one in overrides if not one.startswith(_PREFIX) or "=" not in one]
    if bad:
        remedy = f"is not `resilience.<key>=<value>`: {_KEYS} lists the keys"
        raise ConfigError([f"`{one}` {remedy}" for one in bad], "The command line")
    try:
        given = OmegaConf.from_dotlist([one.removeprefix(_PREFIX) for one in overrides])
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError([f"`{' '.join(overrides)}`: {error}"], "The command line") from error
    return load(given)
