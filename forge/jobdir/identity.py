"""The identity of a job: the program, the Run's name, and the user's config as written.

<job dir>/.forge/start.yaml  the job's config, under `written`
<job dir>/.forge/asked/      the new config of `resilience.resume=changed`, until it is accepted

Two starts are the same job if all three are equal, wherever output and code are. The config's
`hydra` and `resilience` do not count, and interpolations (`${now:…}`, `${base.lr}`) are compared as
text, since the keys they refer to are compared as well. The config is `config=` of forge.Run, else
Hydra's; without either, the command's arguments are compared.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import ConfigError
from forge.jobdir.job_dir import as_typed, hydra_config
from forge.jobdir.job_files import RESUME, forge_dir

CONFIG, START = "config.yaml", "start.yaml"
"""The files of a job's config; `forge/hydra_app/frozen.py` describes their content."""
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FORGE_RESTART_COUNT")
_SHOWN, _WIDTH = 20, 80
_MISSING = object()
_LOCAL_RANK = ("--local-rank", "--local_rank")
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Identity:
    """Two starts with equal identities are the same job."""

    program: str
    name: str
    """The Run's name."""
    config: dict[str, Any] | None
    """Dotted key -> value; None if it is not known."""
    words: list[str] | None = None
    """The command's arguments if the config is not known; None if they are not known either."""

    @property
    def is_known(self) -> bool:
        """Whether the config or the arguments are known, and not only program and name."""
        return self.config is not None or self.words is not None


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


def current(job_dir: Path, name: str, config: dict[str, Any] | None = None) -> Identity:
    """The identity of the Run with this name in the job in `job_dir`.

    Args:
        config: `config=` of forge.Run by dotted keys; None if it was not passed.
    """
    for folder in (asked(job_dir), forge_dir(job_dir)):
        config = _read(folder) if config is None else config
    return Identity(_program(), name, config, _words() if config is None else None)


def is_change_wanted() -> bool:
    """Whether the environment allows this start to resume the job with a changed config.

    An automatic restart, which has the same environment, does not count.

    Raises:
        ConfigError: If the variable is neither `same` nor `changed`.
    """
    value = os.environ.get(RESUME) or "same"
    if value not in ("same", "changed"):
        raise ConfigError([f"`{RESUME}={value}`: expected same or changed"], "The environment")
    return value == "changed" and all((os.environ.get(one) or "0") == "0" for one in _RESTARTS)


def _program() -> str:
    """The script's name without its directory; for `python -m package` the package's name."""
    path = Path(sys.argv[0] or "python")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name.removesuffix(".py")


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


def as_written(cfg: Any) -> dict[str, Any]:
    """The user's part of a composed config, unresolved, by dotted keys."""
    from omegaconf import OmegaConf

    from forge.jobdir import flat_config

    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    return flat_config.flat({str(key): one for key, one in tree.items()})[0]


# -- the command's arguments, if there is no config ------------------------------------------------


def _words() -> list[str] | None:
    """The command's arguments, without the local rank; under Hydra the job's overrides.

    Returns:
        None if they are not the user's: in a notebook, an interactive Python, a submitit task.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        from forge.compat import of_submitit

        if spec.name == of_submitit.SUBMIT_MODULE:
            return None
    hydra = hydra_config()
    if hydra is not None:
        typed = as_typed(hydra.overrides.task)
        return [one for one in typed if not one.lstrip("+~").startswith("resilience.")]
    if getattr(main, "__file__", None) is None and sys.argv[:1] not in (["-c"], ["-"]):
        return None
    return _without_local_rank(sys.argv[1:])


def _without_local_rank(words: list[str]) -> list[str]:
    """Drop `--local-rank`, which `torch.distributed.launch` passes to each rank."""
    kept: list[str] = []
    is_value = False
    for word in words:
        name, has_value, _ = word.partition("=")
        if not is_value and name not in _LOCAL_RANK:
            kept.append(word)
        is_value = not is_value and name in _LOCAL_RANK and not has_value
    return kept


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


# -- in the job's directory ----------------------------------------------------------------------


def asked(job_dir: Path) -> Path:
    """The folder of a requested new config, with the same files as the job's current one."""
    return forge_dir(job_dir) / "asked"


def _read(folder: Path) -> dict[str, Any] | None:
    from forge.jobdir import config_file

    try:
        written = config_file.read(folder / START, is_executed=False).get("written")
    except FileNotFoundError:
        return None
    return written if isinstance(written, dict) else None


def stored(job_dir: Path) -> dict[str, Any] | None:
    """The config as written at the job's first start; None if it is not known."""
    return _read(forge_dir(job_dir))


def forget_asked(job_dir: Path) -> None:
    """Discard a requested config: the job keeps its current one."""
    shutil.rmtree(asked(job_dir), ignore_errors=True)


def take_asked(job_dir: Path) -> None:
    """Replace the job's config by the requested one, if there is one."""
    # In this order: if a kill leaves the new config with the old identity, the next start refuses.
    for name in (CONFIG, START):
        path = asked(job_dir) / name
        if path.exists():
            path.replace(forge_dir(job_dir) / name)
    forget_asked(job_dir)
