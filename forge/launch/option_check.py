"""What both launchers ask of their options; every problem is reported at once."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.errors import ConfigError
from forge.hydra_app.frozen import escaped

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Options = TypeVar("_Options", bound="DataclassInstance")
_PROGRESS = ("auto", "live", "plain", "none")


class OptionCheck(Generic[_Options]):
    """The options that were given, as a value of their dataclass, and what is wrong with them."""

    def __init__(self, kind: type[_Options], given: dict[str, Any]) -> None:
        typed = OmegaConf.structured(kind)
        known = [str(key) for key in typed if key != "_target_"]
        self.problems: list[str] = []
        self._given = given
        for key, value in given.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"Did you mean `{near[0]}`?" if near else f"There are {', '.join(known)}."
                self._note(key, f"there is no such key. {hint}")
                continue
            try:
                typed[key] = _literal(value)
            except OmegaConfBaseException as error:
                self._note(key, str(error).splitlines()[0].rstrip(".") + ".")
        self.options = cast(_Options, OmegaConf.to_object(typed))

    def _note(self, key: str, problem: str) -> None:
        self.problems.append(f"`hydra.launcher.{key}={self._given[key]}`: {problem}")

    def expect(self, key: str, *, is_good: bool, expected: str) -> None:
        """Note an option that is not as expected."""
        if not is_good:
            self._note(key, f"expected {expected}.")

    def expect_least(self, least: float, *keys: str) -> None:
        """Each of them at least so much, or null."""
        for key in keys:
            value = getattr(self.options, key)
            self.expect(
                key, is_good=value is None or value >= least, expected=f"at least {least:g}"
            )

    def expect_common(self) -> None:
        """The time limit, and a way to show how the jobs get on: what both launchers have."""
        limit_min, progress = (getattr(self.options, key) for key in ("timeout_min", "progress"))
        is_limit = limit_min is None or 0 < limit_min < float("inf")
        self.expect("timeout_min", is_good=is_limit, expected="minutes above 0")
        self.expect("progress", is_good=progress in _PROGRESS, expected=" | ".join(_PROGRESS))

    def checked(self) -> _Options:
        """The options.

        Raises:
            ConfigError: With every problem found.
        """
        if self.problems:
            raise ConfigError(self.problems, "The launcher's configuration")
        return self.options


def _literal(value: Any) -> Any:
    """As OmegaConf reads it back: a shell's `${HOME}` is no interpolation."""
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, list):
        return [_literal(one) for one in value]
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    return escaped(value) if isinstance(value, str) else value
