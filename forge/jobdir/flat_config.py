"""A config as dotted keys and values that JSON can store: Hydra's, or `config=` of forge.Run."""

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
"""Top-level keys that say where a job runs and how, and not what it computes."""


def flat(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config by dotted keys.

    Args:
        config: A tree of mappings, Namespaces, dataclasses, lists and plain values.
    Returns:
        (all values, keys of those that JSON cannot store: only their type is in the values).
    """
    odd: list[str] = []
    return dict(_flat({k: v for k, v in config.items() if k not in LEFT_OUT}, "", odd)), odd


def given(config: Any) -> tuple[dict[str, Any], list[str]]:
    """`config=` of forge.Run by dotted keys.

    Returns:
        (values, keys of what is left out).
    Raises:
        ConfigError: For anything but a Namespace, a dataclass or a mapping.
    """
    items = _items(config)
    if items is None:
        raise ConfigError(
            [
                f"`config=` is of type {type(config).__qualname__}: expected an argparse.Namespace,"
                " a dataclass, or a mapping of the settings that make this job another job."
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
    """What a container of named values holds; None if it is none."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    found = _unresolved(value)
    return dict(found) if isinstance(found, Mapping) else None


def _unresolved(value: Any) -> Any:
    """A config of OmegaConf's as plain containers: interpolations are compared as text."""
    if "omegaconf" in sys.modules:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=False)
    return value


def _storable(value: Any, odd: list[Any]) -> Any:
    """As JSON has it; what JSON has not is appended to `odd`."""
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
    return f"<{type(value).__qualname__}>"  # its text may hold an address
