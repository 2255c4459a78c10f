"""The differences between two starts of a job, key by key, as text for people."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from forge.jobdir.identity import Identity

_SHOWN, _WIDTH = 20, 80
_MISSING = object()
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Change:
    """A config value that has changed."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = self.shown
        return f"{self.key}: {before} before, {now} now"

    @property
    def shown(self) -> tuple[str, str]:
        """Both values, shortened to an excerpt where they differ."""
        texts = [_text_for_people(one) for one in (self.before, self.now)]
        pairs = enumerate(zip(*texts, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), 0)
        start = max(0, same - _WIDTH // 2) if max(map(len, texts)) > _WIDTH else 0
        before, now = (_excerpt(one, start) for one in texts)
        return before, now


def differences(before: Identity, now: Identity) -> list[Change]:
    """All differences between two identities; config keys are sorted."""
    pairs = [("(program)", before.program, now.program), ("(name=)", before.name, now.name)]
    found = [Change(*pair) for pair in pairs if pair[1] != pair[2]]
    if not before.is_known:
        return found  # there is no earlier config to compare with
    if before.config is not None and now.config is not None:
        return found + changes(before.config, now.config)
    if before.words is not None and now.words is not None:
        return found + _changed_words(before.words, now.words)
    return [*found, Change("(config)", _what_is_known(before), _what_is_known(now))]


def _what_is_known(one: Identity) -> str:
    if one.config is not None:
        return "known"
    return (
        "not known"
        if one.words is None
        else "not known (only the arguments of the command are known)"
    )


def _changed_words(before: list[str], now: list[str]) -> list[Change]:
    if before == now:
        return []
    found = changes(_by_option(before), _by_option(now))
    # If the options are equal, they are in another order or written in another way.
    return found or [Change("(arguments)", shlex.join(before), shlex.join(now))]


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """The keys that differ, sorted."""
    return [
        Change(key, before.get(key, "(not set)"), now.get(key, "(not set)"))
        for key in sorted(before.keys() | now.keys())
        if _text(before.get(key, _MISSING)) != _text(now.get(key, _MISSING))
    ]


def listed(found: list[Change], indent: int = 2) -> str:
    """The changes as indented lines."""
    more = len(found) - _SHOWN
    lines = [*map(str, found[:_SHOWN]), *([f"… and {more} more"] if more > 0 else [])]
    return "".join(f"\n{' ' * indent}- {line}" for line in lines)


def _text_for_people(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    return json.dumps(value, ensure_ascii=isinstance(value, str))


def _excerpt(text: str, start: int) -> str:
    part = text[start : start + _WIDTH]
    return ("…" if start else "") + part + ("…" if start + _WIDTH < len(text) else "")


def _text(value: Any) -> str:
    """Equal only for equal values: 1, 1.0 and true differ, and NaN equals NaN."""
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


def _by_option(words: list[str]) -> dict[str, object]:
    """The arguments as `--option` -> value, to show differences: `--seed: 0 before, 7 now`."""
    found: dict[str, list[str]] = {}
    option = ""
    number = 0
    for word in words:
        name, has_value, value = word.partition("=")
        is_option = word.startswith("-") and not _NUMBER.match(word)
        if is_option or (has_value and not option):  # --lr=1, and lr=1
            found.setdefault(name, []).extend([value] if has_value else [])
            option = "" if has_value else name
        elif option:
            found[option].append(word)
        else:
            number += 1
            found[f"(argument {number})"] = [word]
    return {name: " ".join(values) if values else True for name, values in found.items()}
