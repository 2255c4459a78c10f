"""Converts a policy (from Hydra, or a plain dict) to its typed form, key by key."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from forge.config.schema import (
    SIGNALS,
    SLURM_KEYS,
    CommandCheckConfig,
    Policy,
    RequeueRule,
    SignalAction,
)


def signal_name(name: str) -> str:
    """The name that a policy uses: `SIGUSR2`, `usr2` and `USR2` are the same signal."""
    return str(name).upper().removeprefix("SIG")


def convert(policy: Any) -> tuple[Policy, dict[str, str]]:
    """Convert `policy`; a value that does not fit keeps its default and is reported.

    Returns:
        The policy; each problem, and the key that has it (empty: the whole policy).
    """
    typed = pickle.loads(_defaults())  # three times as fast as copy.deepcopy
    problems: dict[str, str] = {}
    if isinstance(policy, Policy):
        policy = asdict(policy)  # a dataclass takes every value: check it like any other
    if policy is None or (isinstance(policy, DictConfig) and policy in (None,)):  # a null in YAML
        policy = {}
    if not isinstance(policy, Mapping):
        problems[
            f"`resilience` is {policy!r:.60}: expected a group of keys. Choose a preset, for"
            " example `resilience=default`, in the defaults list of your config."
        ] = ""
        policy = {}
    if _is_whole_config(policy):
        problems[
            "this is the whole config of your app: pass only `cfg.resilience`, its part for forge."
        ] = ""
        policy = {}
    own: dict[str, Any] = {}
    for key, value in _leaves(_resolved(policy, "", problems), ""):
        if key in _SLURM:
            if value is not None:
                own[key.removeprefix("slurm.")] = value
            continue
        problem = _set(typed, key, value)
        if problem:
            problems[problem] = key
    result = OmegaConf.to_object(typed)
    assert isinstance(result, Policy)
    result.slurm = own
    if signal_name(result.signal.name) in SIGNALS:
        result.signal.name = signal_name(result.signal.name)
    if signal_name(result.exec.signal) in SIGNALS:
        result.exec.signal = signal_name(result.exec.signal)
    return result, problems


_MANY = 5
"""Number of keys beyond which a mapping without any key of a policy is another config."""


def _is_whole_config(policy: Mapping[Any, Any]) -> bool:
    """Whether it is an app's whole config, with or without a policy in it."""
    names = {str(name) for name in policy}
    is_strange = len(names) > _MANY and names.isdisjoint(asdict(Policy()))
    return "resilience" in names or is_strange


_SLURM = frozenset(f"slurm.{name}" for name in SLURM_KEYS)


@functools.cache
def _defaults() -> bytes:
    """The defaults, pickled; cached, since OmegaConf takes 20 ms to read the schema."""
    return pickle.dumps(OmegaConf.structured(Policy))


@functools.cache
def _plain_defaults() -> dict[str, Any]:
    """Each key's default as in YAML, except those of signals, which have several names."""
    leaves = [leaf for leaf in _leaves(asdict(Policy()), "") if "signal.actions." not in leaf[0]]
    return {key: value.name if isinstance(value, Enum) else value for key, value in leaves}


def _resolved(tree: Mapping[Any, Any], prefix: str, problems: dict[str, str]) -> dict[str, Any]:
    """The tree as plain values; a failing interpolation is reported and dropped."""
    found: dict[str, Any] = {}
    for name in tree:
        try:
            value = tree[name]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except MissingMandatoryValue:
            value = "???"
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            key = f"{prefix}{name}"
            problems[f"`resilience.{key}` cannot be resolved: {reason}"] = key
            continue
        is_group = isinstance(value, Mapping)
        found[str(name)] = _resolved(value, f"{prefix}{name}.", problems) if is_group else value
    return found


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in _SLURM:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


@functools.cache
def known_keys() -> tuple[str, ...]:
    """All keys of a policy, dotted, without the leading `resilience.`."""
    found = (key for key, _ in _leaves(asdict(Policy()), "") if key != "slurm")
    return (*found, *(f"slurm.{name}" for name in SLURM_KEYS))


def _set(typed: DictConfig, key: str, value: Any) -> str | None:
    """Set one key with OmegaConf's own conversion; return the problem, or None."""
    shown = f"`resilience.{key}={value}`"
    path = key
    if key.startswith("signal.actions."):
        name = signal_name(key.rsplit(".", 1)[-1])
        if name not in SIGNALS:
            return f"{shown}: unknown signal. A policy can name {', '.join(SIGNALS)}."
        path = f"signal.actions.{name}"
    elif key.startswith(COMMANDS):
        problem = _add_command(typed, key, shown)
        if problem:
            return problem
    elif key not in known_keys():
        from forge.config import unknown  # a right policy needs none of it

        return unknown.problem(key, value, known_keys())
    default = _plain_defaults().get(path, ...)
    if type(value) is type(default) and value == default:
        return None  # true of most keys, and OmegaConf takes 0.2 ms to set a key
    if isinstance(value, bool) and not isinstance(OmegaConf.select(typed, path), bool):
        # YAML 1.1 reads on, off, yes and no as booleans; OmegaConf would take True for 1.
        return f"{shown}: {_expected(typed, path)}, found a boolean."
    if isinstance(value, float) and _kind(typed, path) is int:
        if not value.is_integer():
            return f"{shown}: {_expected(typed, path)}, found a fraction."
        value = int(value)  # 1e3
    before = OmegaConf.select(typed, path, default=SignalAction.ignore)
    if isinstance(before, ListConfig):
        before = list(before)  # an update changes the list in place
    try:
        OmegaConf.update(typed, path, value)
        # Resolves an interpolation, and refuses `???`.
        _resolve(OmegaConf.select(typed, path, throw_on_missing=True))
    except OmegaConfBaseException:
        OmegaConf.update(typed, path, before)
        if isinstance(value, str) and "${" in value:
            return f"{shown}: this interpolation does not give {_expected(typed, path, '')}."
        return f"{shown}: {_expected(typed, path)}, found {value!r}."
    return None


COMMANDS = "health.commands."
"""The group of a site's own checks, each by its name."""


def _add_command(typed: DictConfig, key: str, shown: str) -> str | None:
    """Add the key of a site's own check; returns the problem if its name is wrong."""
    name, _, field = key.removeprefix(COMMANDS).partition(".")
    known = [one.name for one in fields(CommandCheckConfig)]
    if field not in known:
        members = ", ".join(f"resilience.{COMMANDS}{name}.{one}" for one in known)
        return f"{shown}: a health check command has no such key. Its keys are {members}."
    if name not in typed.health.commands:
        typed.health.commands[name] = CommandCheckConfig()
    return None


def _resolve(value: Any) -> None:
    if isinstance(value, ListConfig):
        OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def _kind(typed: DictConfig, key: str) -> Any:
    """The type of a key's value, or of its elements; None: the policy has no such key."""
    from forge.compat import of_omegaconf  # few policies have a value that has to be converted

    parent, _, name = key.rpartition(".")
    node = of_omegaconf.child_of(OmegaConf.select(typed, parent) if parent else typed, name)
    if node is None:
        return None
    return of_omegaconf.element_type(node) or of_omegaconf.declared_type(node)


def _expected(typed: DictConfig, key: str, verb: str = "expected ") -> str:
    kind = SignalAction if key.startswith("signal.actions.") else _kind(typed, key)
    if hasattr(kind, "__members__"):
        return verb + " | ".join(kind.__members__)
    if kind is RequeueRule:
        return verb + "a list of {exit_codes: [1, …], max_restarts: 2}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return verb + names.get(kind, "a value")
