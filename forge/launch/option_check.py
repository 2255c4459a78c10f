"""Checks of the options of both launchers; all problems are reported together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.hydra_app.frozen import escaped

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Options = TypeVar("_Options", bound="DataclassInstance")
_PROGRESS = ("auto", "live", "plain", "none")


def read(
    kind: type[_Options], given: Mapping[str, Any], least: Mapping[str, float]
) -> tuple[_Options, dict[str, str]]:
    """The options as their dataclass, and their problems by key.

    Args:
        kind: The dataclass, which has `timeout_min` and `progress`.
        given: The options in the config.
        least: The minimum of each option that is not null.
    """
    typed = OmegaConf.structured(kind)
    problems: dict[str, str] = {}
    for key, value in given.items():
        if key not in typed or key == "_target_":
            problems[key] = f"there is no such key. {_near(key, [str(one) for one in typed])}"
            continue
        try:
            typed[key] = _literal(value)
        except OmegaConfBaseException as error:
            problems[key] = str(error).splitlines()[0].rstrip(".") + "."
    options: Any = OmegaConf.to_object(typed)
    for key, bound in least.items():
        value = getattr(options, key)
        if value is not None and value < bound:
            problems[key] = f"expected at least {bound:g}."
    if options.timeout_min is not None and not 0 < options.timeout_min < math.inf:
        problems["timeout_min"] = "expected minutes above 0."
    if options.progress not in _PROGRESS:
        problems["progress"] = f"expected {' | '.join(_PROGRESS)}."
    return cast(_Options, options), problems


def sentences(given: Mapping[str, Any], problems: Mapping[str, str], group: str) -> list[str]:
    """Problems by key as whole sentences; `group` is the config group of the keys."""
    shown = {key: f"{key}={value}" for key, value in given.items()}
    return [f"`{group}.{shown.get(key, key)}`: {one}" for key, one in problems.items()]


def _near(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    shown = ", ".join(one for one in known if one != "_target_")
    return f"Did you mean `{near[0]}`?" if near else f"There are {shown}."


def _literal(value: Any) -> Any:
    """Escaped for OmegaConf, so that a shell's `${HOME}` is not taken for an interpolation."""
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, list):
        return [_literal(one) for one in value]
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    return escaped(value) if isinstance(value, str) else value
