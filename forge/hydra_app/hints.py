"""Hints for overrides that Hydra refuses: of `resilience`, and of forge's launchers.

Hydra reports such a key before forge sees the config, so the hint is printed after Hydra's message,
when the process ends. Only a command line with a key of forge, or with a key that looks like a
mistyped one (`resiliance.`, `hydra.launcher.njobs`), prepares a hint.
"""

from __future__ import annotations

import atexit
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from forge import messages

_OVERRIDE = re.compile(r"[+~]{0,2}resilience\.([\w.]+)=")

_ANY = re.compile(r"[+~]{0,2}([\w/]+)([\w./]*)=")
_NO_PRESET = re.compile(r"\+{0,2}(resilience=(?:null|true|false|[\d.]+))$", re.IGNORECASE)
_LAUNCHER = "hydra.launcher"
_SIMILAR = 0.8
"""How much two names resemble each other if one is the other, mistyped."""

ADD_PRESET = (
    "add a preset to its defaults list (`defaults: [resilience: default, _self_]`), or add"
    " `+resilience=default` to this command"
)
"""What to do if a config has no `resilience`."""

pending_keys: list[str] = []
"""Overrides below `resilience` that need a preset which the config does not have."""
_arguments: list[str] = []
_search_path: list[Callable[[], Iterable[str]]] = []
"""Returns the app's own entries of Hydra's search path."""
_mistyped: list[str] = []
"""Hints for keys whose first words are mistyped, or that no launcher has."""


def arm(arguments: Iterable[str], search_path: Callable[[], Iterable[str]] = tuple) -> None:
    """Prepare hints for the overrides in a command line.

    Args:
        arguments: The words of the command line.
        search_path: Returns the app's own entries of Hydra's search path. Called for the hint:
            Hydra adds `--config-dir` later.
    """
    words = list(arguments)
    _arguments[:], _search_path[:] = words, [search_path]
    keys = [match[1] for match in map(_OVERRIDE.match, words) if match]
    mistyped = [one for one in map(_mistyped_hint, words) if one]
    if (keys or mistyped) and not (pending_keys or _mistyped):
        pending_keys.extend(keys)
        _mistyped.extend(mistyped)
        atexit.register(_print)


def _mistyped_hint(word: str) -> str:
    """The hint for an override whose first words look like mistyped ones of forge; else empty."""
    if no_preset := _NO_PRESET.match(word):
        return (
            f"`{no_preset[1]}`: expected the name of a preset, for example `resilience=default`."
            " To train without forge, write `resilience=disabled`."
        )
    match = _ANY.match(word)
    if match is None:
        return ""
    first, rest = match[1], match[2]
    key = first + rest
    if first != "resilience" and _is_similar(first, "resilience"):
        return f"`{key}`: there is no `{first}`. Did you mean `resilience{rest}`?"
    group, _, name = key.rpartition(".")
    if group != _LAUNCHER and _is_similar(group, _LAUNCHER):
        return f"`{key}`: there is no `{group}`. Did you mean `{_LAUNCHER}.{name}`?"
    if key != "hydra/launcher" and _is_similar(key, "hydra/launcher"):
        return f"`{key}`: there is no such group. Did you mean `hydra/launcher`?"
    return _launcher_hint(name) if group == _LAUNCHER else ""


def _is_similar(name: str, known: str) -> bool:
    return difflib.SequenceMatcher(None, name, known).ratio() >= _SIMILAR


def _launcher_hint(name: str) -> str:
    """The hint for an option that the command's launcher does not have; else empty."""
    from forge.config import slurm_keys

    local = {*slurm_keys.OF_LOCAL_JOBS}
    slurm = {*slurm_keys.PER_JOB, *slurm_keys.OF_THE_SWEEP} - local - slurm_keys.OF_BOTH
    for launcher, other, options in (("local", "slurm", slurm), ("slurm", "local", local)):
        if f"hydra/launcher={launcher}" in _arguments and name in options:
            return (
                f"`{_LAUNCHER}.{name}` is an option of `hydra/launcher={other}`, not of"
                f" `hydra/launcher={launcher}`. Remove the option, or change the launcher."
            )
    known = [*slurm_keys.PER_JOB, *slurm_keys.OF_THE_SWEEP, *slurm_keys.OF_LOCAL_JOBS]
    near = difflib.get_close_matches(name, known, 1)
    if name in known or name.startswith("_") or not near:
        return ""
    return (
        f"`{_LAUNCHER}.{name}` is not an option of forge's launchers. Did you mean"
        f" `{_LAUNCHER}.{near[0]}`?"
    )


def composition_succeeded() -> None:
    """Hydra accepted all overrides: print no hint."""
    pending_keys.clear()
    _mistyped.clear()


def hints_for(keys: Iterable[str]) -> list[str]:
    """One sentence for each key that Hydra possibly refused."""
    from forge.config import removed, slurm_keys
    from forge.config.conversion import known_keys, signal_name
    from forge.config.schema import SIGNALS
    from forge.config.unknown import group_problem, suggestion

    known = known_keys()
    unknown = [key for key in keys if key not in known]
    if not unknown:
        if _has_preset():  # Hydra refuses something else
            return []
        return [f"if your config has no `resilience` yet, {ADD_PRESET}"]
    found = []
    for key in unknown:
        group, _, name = key.rpartition(".")
        refused = removed.problem(key) or slurm_keys.refused(key)
        if refused is not None:
            found.append(refused)
        elif problem := group_problem(key, known):
            found.append(f"`resilience.{key}`: {problem}")
        elif group == "signal.actions" and signal_name(name) in SIGNALS:
            found.append(f"write `resilience.{group}.{signal_name(name)}=…`")
        elif instead := suggestion(key, known):
            found.append(f"`resilience.{key}` is not a key of forge's policy. {instead}")
        # A key unlike any of ours can be the app's own, and Hydra has reported it.
    return found


def _has_preset() -> bool:
    """Whether the command, or a config in Hydra's search path, names a `resilience` preset.

    Entries of `hydra.searchpath` count if they contain no interpolation.
    """
    if any(word.lstrip("+").startswith("resilience=") for word in _arguments):
        return True
    texts = _configs(entry for entries in _search_path for entry in entries())
    lists = [one for text in (*texts, *_arguments) for one in _SEARCH_PATH.findall(text)]
    more = [entry for one in lists for entry in _ENTRY.findall(one)]
    return any("resilience" in text for text in (*texts, *_configs(more)))


_SEARCH_PATH = re.compile(r"searchpath\s*[:=]\s*(\[[^]]*\]|(?:\s*-[^\n]*)+)")
"""The list in an override or in YAML, in brackets or with one entry a line."""
_ENTRY = re.compile(r"[^\s,'\"\[\]-][^\s,'\"\[\]]*")
"""A URL, or the path of a directory."""


def _configs(entries: Iterable[str]) -> list[str]:
    """The texts of the configs in entries of Hydra's search path, and in their groups."""
    directories = [Path(one) for entry in entries for one in _directories(entry)]
    files = [
        file for one in directories for glob in ("*.y*ml", "*/*.y*ml") for file in one.glob(glob)
    ]
    return [file.read_text(errors="replace") for file in files]


def _directories(entry: str) -> Iterable[str]:
    if not entry.startswith("pkg://"):
        return [entry.removeprefix("file://")]
    try:
        spec = importlib.util.find_spec(entry.removeprefix("pkg://").replace("/", "."))
    except ImportError:
        return []  # Hydra has reported it
    return (spec and spec.submodule_search_locations) or []


def _print() -> None:
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        return  # a job began, in an app with its own `resilience` group
    hints = hints_for(pending_keys) if pending_keys and not _mistyped else []
    for hint in [*_mistyped, *hints]:
        sys.stderr.write(f"forge: {messages.escape(hint)}\n")
