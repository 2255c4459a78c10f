"""Flatten Hydra's config, or `config=` of forge.Run, to dotted keys with JSON values."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from forge.errors import ConfigError

LEFT_OUT = ("hydra", "resilience", "local_rank")
"""Top-level keys that do not affect what a job computes, only where and how it runs."""


def flat(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Flatten a config to dotted keys.

    Args:
        config: A tree of mappings, Namespaces, dataclasses, lists and plain values.
    Returns:
        (key -> value, keys of values that JSON cannot store, which are replaced by their type).
    """
    odd: list[str] = []
    return dict(_flat({k: v for k, v in config.items() if k not in LEFT_OUT}, "", odd)), odd


def given(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Flatten `config=` of forge.Run to dotted keys.

    Returns:
        (key -> value, keys that are left out since JSON cannot store their values).
    Raises:
        ConfigError: Unless it is a Namespace, a dataclass or a mapping.
    """
    items = _items(config)
    if items is None:
        raise ConfigError(
            [
                f"`config=` is of type {type(config).__qualname__}: expected an argparse.Namespace,"
                " a dataclass or a mapping, with the settings that distinguish jobs."
            ],
            "This Run",
        )
    values, odd = flat(items)
    return {key: value for key, value in values.items() if key not in odd}, odd


def _flat(value: Any, prefix: str, odd: list[str]) -> Iterator[tuple[str, Any]]:
    items = _items(value)
    if items is not None and (items or not prefix):
        for key, one in items.items():
            name = key.name if isinstance(key, Enum) else str(key)
            yield from _flat(one, f"{prefix}.{name}" if prefix else name, odd)
        return
    has_odd: list[Any] = []
    yield prefix, _storable(value, has_odd)
    if has_odd:
        odd.append(prefix)


def _items(value: Any) -> dict[Any, Any] | None:
    """The items of a container of named values; None for other values."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    found = _unresolved(value)
    return dict(found) if isinstance(found, Mapping) else None


def _unresolved(value: Any) -> Any:
    """Convert an OmegaConf config to plain containers; interpolations stay as text."""
    if "omegaconf" in sys.modules:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=False)
    return value


def _storable(value: Any, odd: list[Any]) -> Any:
    """Convert a value for JSON; values that JSON cannot store are appended to `odd`."""
    items = _items(value)
    if items is not None:
        return {str(key): _storable(one, odd) for key, one in items.items()}
    value = _unresolved(value)
    if isinstance(value, list | tuple):
        return [_storable(one, odd) for one in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path | bytes):
        return str(value)
    odd.append(value)
    return f"<{type(value).__qualname__}>"  # not its repr, which can contain an address
