"""Which job this is: the program, the Run's name, and the user's config as it was written.

<job dir>/.forge/start.yaml  holds it for whoever trains there, under `written`
<job dir>/.forge/asked/      the config that `resilience.resume=changed` asks for, until taken

Two starts are the same job where all three agree, wherever their output and their code lie. Of the
config `hydra` and `resilience` do not count, and interpolations (`${now:…}`, `${base.lr}`) are
compared as they stand in the file: what they refer to is compared where it stands. The config is
`config=` of forge.Run if given, else Hydra's; without either the arguments of the command count.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import ConfigError
from forge.jobdir import flat_config, words
from forge.jobdir.job_files import RESUME, forge_dir

CONFIG, START = "config.yaml", "start.yaml"
"""The files of a job's config; `forge/hydra_app/frozen.py` says what they hold."""
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FORGE_RESTART_COUNT")
_SHOWN, _WIDTH = 20, 80
_MISSING = object()


@dataclass(frozen=True)
class Identity:
    """What makes a job the same job."""

    program: str
    name: str
    """The Run's."""
    config: dict[str, Any] | None
    """Dotted key -> value; None where it is not known."""
    words: list[str] | None = None
    """The arguments of the command, where the config is not known; None: neither are they."""

    @property
    def is_known(self) -> bool:
        """Whether more is known than the names of program and Run."""
        return self.config is not None or self.words is not None


@dataclass(frozen=True)
class Change:
    """A value that was another one before."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = self.shown
        return f"{self.key}: {before} before, {now} now"

    @property
    def shown(self) -> tuple[str, str]:
        """Both values as short texts that differ."""
        texts = [_text_for_people(one) for one in (self.before, self.now)]
        pairs = enumerate(zip(*texts, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), 0)
        start = max(0, same - _WIDTH // 2) if max(map(len, texts)) > _WIDTH else 0
        before, now = (_excerpt(one, start) for one in texts)
        return before, now


def current(job_dir: Path, name: str, config: dict[str, Any] | None = None) -> Identity:
    """Of the Run with this name in the job that lies in `job_dir`.

    Args:
        config: What `config=` of forge.Run holds, by dotted keys; None: it was not given.
    """
    for folder in (asked(job_dir), forge_dir(job_dir)):
        config = _read(folder) if config is None else config
    return Identity(_program(), name, config, words.of_program() if config is None else None)


def is_change_wanted() -> bool:
    """Whether the environment says that this start takes the job on with what has changed.

    A restart by whoever restarts this process, with the same environment, takes nothing on.

    Raises:
        ConfigError: For another value of the variable than `same` and `changed`.
    """
    value = os.environ.get(RESUME) or "same"
    if value not in ("same", "changed"):
        raise ConfigError([f"`{RESUME}={value}`: expected same or changed"], "The environment")
    return value == "changed" and all((os.environ.get(one) or "0") == "0" for one in _RESTARTS)


def _program() -> str:
    """The script's name, without its place; of `python -m package` the package's."""
    path = Path(sys.argv[0] or "python")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name.removesuffix(".py")


def differences(before: Identity, now: Identity) -> list[Change]:
    """Everything in which they differ, sorted by key."""
    pairs = [("(program)", before.program, now.program), ("(name=)", before.name, now.name)]
    found = [Change(*pair) for pair in pairs if pair[1] != pair[2]]
    if not before.is_known:
        return found  # there is nothing to compare with
    if before.config is not None and now.config is not None:
        return found + changes(before.config, now.config)
    if before.words is not None and now.words is not None:
        return found + _changed_words(before.words, now.words)
    return [*found, Change("(config)", _what_is_known(before), _what_is_known(now))]


def _what_is_known(one: Identity) -> str:
    if one.config is not None:
        return "known"
    return "not known" if one.words is None else "not known (only the command's arguments)"


def _changed_words(before: list[str], now: list[str]) -> list[Change]:
    if before == now:
        return []
    found = changes(words.by_option(before), words.by_option(now))
    # The same options in another order, or written in another way.
    return found or [Change("(arguments)", shlex.join(before), shlex.join(now))]


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


def _text_for_people(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    return json.dumps(value, ensure_ascii=isinstance(value, str))


def _excerpt(text: str, start: int) -> str:
    part = text[start : start + _WIDTH]
    return ("…" if start else "") + part + ("…" if start + _WIDTH < len(text) else "")


def _text(value: Any) -> str:
    """Equal for equal values only: 1, 1.0 and true are three, and NaN is itself."""
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


def as_written(cfg: Any) -> dict[str, Any]:
    """The user's part of a composed config that is not resolved yet, by dotted keys."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    return flat_config.flat({str(key): one for key, one in tree.items()})[0]


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
