"""Which job this is: the program, the Run's name, and the user's config as it was written.

<job dir>/.forge/start.yaml  holds it for whoever trains there, under `written`
<job dir>/.forge/asked/      the config that `resilience.resume=changed` asks for, until taken

Two starts are the same job where all three agree, wherever their output and their code lie. Of the
config `hydra` and `resilience` do not count, and interpolations (`${now:…}`, `${base.lr}`) are
compared as they stand in the file: what they refer to is compared where it stands.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from forge.jobdir.job_files import forge_dir

CONFIG, START = "config.yaml", "start.yaml"
"""The files of a job's config; `forge/hydra_app/frozen.py` says what they hold."""
_LEFT_OUT = ("hydra", "resilience")
_SHOWN, _WIDTH = 20, 80
_MISSING = object()


@dataclass(frozen=True)
class Identity:
    """What makes a job the same job."""

    program: str
    name: str
    """The Run's."""
    config: dict[str, Any] | None
    """Dotted key -> value; None where it is not known: outside Hydra."""


@dataclass(frozen=True)
class Change:
    """A value that was another one before."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} before, {_shown(self.now)} now"


def current(job_dir: Path, name: str) -> Identity:
    """Of the Run with this name in the job that lies in `job_dir`."""
    for folder in (asked(job_dir), forge_dir(job_dir)):
        written = _read(folder)
        if written is not None:
            return Identity(_program(), name, written)
    return Identity(_program(), name, None)


def _program() -> str:
    """The script's name, without its place; of `python -m package` the package's."""
    path = Path(sys.argv[0] or "python")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name.removesuffix(".py")


def differences(before: Identity, now: Identity) -> list[Change]:
    """Everything in which they differ, sorted by key."""
    pairs = [("(program)", before.program, now.program), ("(name=)", before.name, now.name)]
    found = [Change(*pair) for pair in pairs if pair[1] != pair[2]]
    if before.config is None or now.config is None:
        if before.config is not now.config:
            known = ["not known (no preset of `resilience`)", "known"]
            was, is_ = (known[one.config is not None] for one in (before, now))
            found.append(Change("(config)", was, is_))
        return found
    return found + changes(before.config, now.config)


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """The keys that differ, sorted."""
    return [
        Change(key, before.get(key, "(not set)"), now.get(key, "(not set)"))
        for key in sorted(before.keys() | now.keys())
        if _text(before.get(key, _MISSING)) != _text(now.get(key, _MISSING))
    ]


def listed(found: list[Change], indent: int = 2) -> str:
    """One line each, indented."""
    more = len(found) - _SHOWN
    lines = [*map(str, found[:_SHOWN]), *([f"… and {more} more"] if more > 0 else [])]
    return "".join(f"\n{' ' * indent}- {line}" for line in lines)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def _text(value: Any) -> str:
    """Equal for equal values only: 1, 1.0 and true are three, and NaN is itself."""
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


# -- the config as it was written ----------------------------------------------------------------


def as_written(cfg: Any) -> dict[str, Any]:
    """The user's part of a composed config that is not resolved yet, by dotted keys."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(found, dict)
    return dict(_flat({k: one for k, one in found.items() if k not in _LEFT_OUT}, ""))


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not prefix):
        for key, one in value.items():
            name = key.name if isinstance(key, Enum) else str(key)
            yield from _flat(one, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, _storable(value)


def _storable(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, dict):
        return {str(key): _storable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_storable(one) for one in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path | bytes):
        return str(value)
    return f"<{type(value).__qualname__}>"  # its text may hold an address


# -- in the job's directory ----------------------------------------------------------------------


def asked(job_dir: Path) -> Path:
    """Where a config lies that is asked for, with the same files as the job's own."""
    return forge_dir(job_dir) / "asked"


def _read(folder: Path) -> dict[str, Any] | None:
    from forge.jobdir import config_file

    try:
        written = config_file.read(folder / START, is_executed=False).get("written")
    except FileNotFoundError:
        return None
    return written if isinstance(written, dict) else None


def stored(job_dir: Path) -> dict[str, Any] | None:
    """What was written when the job was first started; None where that is not known."""
    return _read(forge_dir(job_dir))


def forget_asked(job_dir: Path) -> None:
    """The job keeps the config that it has."""
    shutil.rmtree(asked(job_dir), ignore_errors=True)


def take_asked(job_dir: Path) -> None:
    """The config that was asked for, if any was, becomes the job's."""
    # In this order: a config beside the identity of another is refused by the next start.
    for name in (CONFIG, START):
        path = asked(job_dir) / name
        if path.exists():
            path.replace(forge_dir(job_dir) / name)
    forget_asked(job_dir)
