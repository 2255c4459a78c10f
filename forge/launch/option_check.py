"""What both launchers ask of their options; every problem is reported at once."""

from __future__ import annotations

import difflib
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forge.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Options = TypeVar("_Options", bound="DataclassInstance")
_PROGRESS = ("auto", "live", "plain", "none")


class OptionCheck(Generic[_Options]):
    """The options that were given, as a value of their dataclass, and what is wrong with them."""

    def __init__(self, kind: type[_Options], given: dict[str, Any]) -> None:
        known = [field.name for field in fields(kind)]
        self.options = kind(**{key: value for key, value in given.items() if key in known})
        self.problems: list[str] = []
        for key in [key for key in given if key not in known]:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"Did you mean `{near[0]}`?" if near else f"There are {', '.join(known)}."
            self.problems.append(
                f"`hydra.launcher.{key}={given[key]}`: there is no such key. {hint}"
            )

    def expect(self, key: str, is_good: bool, expected: str) -> None:
        """Note an option that is not as expected."""
        if not is_good:
            value = getattr(self.options, key)
            self.problems.append(f"`hydra.launcher.{key}={value}`: expected {expected}.")

    def expect_count(self, key: str, least: int, or_null: bool = False) -> None:
        """A whole number."""
        value = getattr(self.options, key)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
        expected = f"a whole number from {least}{', or null' if or_null else ''}"
        self.expect(key, is_count or (or_null and value is None), expected)

    def expect_minutes(self, key: str, or_null: bool = False) -> None:
        """A limit; null is none."""
        value = getattr(self.options, key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_good = (is_number and 0 < value < math.inf) or (or_null and value is None)
        self.expect(key, is_good, f"minutes above 0{', or null for no limit' if or_null else ''}")

    def expect_progress(self, key: str) -> None:
        """A way to show how the jobs get on."""
        self.expect(key, getattr(self.options, key) in _PROGRESS, " | ".join(_PROGRESS))

    def checked(self) -> _Options:
        """The options.

        Raises:
            ConfigError: With every problem found.
        """
        if self.problems:
            raise ConfigError(self.problems, "The launcher's configuration")
        return self.options
