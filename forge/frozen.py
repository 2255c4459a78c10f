"""A job's config as it was at its first start: stored, compared, brought back.

<job dir>/.forge/config.yaml     the user's part of the config, resolved
<job dir>/.forge/overrides.yaml  the overrides it was given
"""

from __future__ import annotations

import contextlib
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from forge import messages
from forge.errors import ForgeError
from forge.job_files import forge_dir, write_atomically

_STORABLE = (str, bytes, int, float, bool, Enum, Path, DictConfig, ListConfig, type(None))


class Contradiction(ForgeError):
    """Overrides ask for another config than the one the job was started with."""


def resolve_now(node: Any, is_root: bool = False) -> None:
    """Replace interpolations by their values, so that main and the stored config see the same.

    `${now:…}` and the like give another value each time somebody asks. What refers to Hydra's own
    config is left: parts of it are not known yet, and it is the same at every start.
    """
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if is_root and key == "hydra":
            continue
        child = node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            if "hydra:" not in str(child._value()) and "hydra." not in str(child._value()):
                with contextlib.suppress(OmegaConfBaseException):  # reported where it is read
                    value = node[key]
                    if isinstance(value, _STORABLE):  # an object would come back as its name
                        node[key] = value
        elif isinstance(child, (DictConfig, ListConfig)) and not (
            child._is_none() or child._is_missing()
        ):
            resolve_now(child)


def task_part(cfg: DictConfig) -> DictConfig:
    """The user's part of a config: all but Hydra's own."""
    with read_write(cfg):
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _task_config(cfg: DictConfig) -> dict[str, Any]:
    """The user's part of the config, resolved."""
    copied = task_part(cfg)
    try:
        container = OmegaConf.to_container(copied, resolve=True)
    except OmegaConfBaseException as error:
        # An interpolation that nobody may ever read: left as it is.
        messages.warn(f"The stored config keeps its interpolations, since one fails: {error}")
        container = OmegaConf.to_container(copied, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def freeze(cfg: DictConfig, directory: Path) -> None:
    """Store the config of a job, unless that was done before."""
    path = forge_dir(directory) / "config.yaml"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    overrides = OmegaConf.to_yaml(cfg.hydra.overrides.task)
    write_atomically(forge_dir(directory) / "overrides.yaml", overrides)
    _store(OmegaConf.create(_task_config(cfg)), directory)


def _store(task_config: DictConfig, directory: Path) -> None:
    write_atomically(forge_dir(directory) / "config.yaml", OmegaConf.to_yaml(task_config))


def is_frozen(directory: Path) -> bool:
    """Whether a job was started in this directory before."""
    return (forge_dir(directory) / "config.yaml").exists()


def forget(directory: Path) -> None:
    """Let the next start begin with whatever config it has."""
    (forge_dir(directory) / "config.yaml").unlink(missing_ok=True)


def restore(cfg: DictConfig, directory: Path) -> None:
    """Make `cfg` the config that the job was first started with; say what has changed since.

    Raises:
        Contradiction: Where an override asks for something else.
    """
    stored = OmegaConf.load(forge_dir(directory) / "config.yaml")
    assert isinstance(stored, DictConfig)
    path = forge_dir(directory) / "overrides.yaml"
    first_overrides = _overrides_in(path)
    before = _flat(_as_stored(cfg))
    after = _flat(OmegaConf.to_container(stored, resolve=False))
    new = [o for o in _typed(cfg) if o not in first_overrides]
    policy = {key: _node(cfg, key) for key in map(_key, new) if _is_policy(key)}
    refused = [o for o in new if _key(o) not in policy and _contradicts(o, cfg, stored)]
    if refused:
        raise Contradiction(
            f"{directory} holds a job that was started with another config; given now:"
            f" {' '.join(refused)}.\nTo go on with the job as it is, leave that out:"
            f" hydra.run.dir={directory}\nTo train with it, start in a new directory."
        )
    overridden = tuple(_key(override) for override in first_overrides)
    changed = sorted(
        key
        for key in before
        if "${" not in str(before[key])
        and before[key] != after.get(key, "")
        and not f"{key}.".startswith(tuple(f"{one}." for one in (*overridden, *policy)))
    )
    if changed:
        shown = ", ".join(f"{k}={after.get(k, 'unset')} (now {before[k]})" for k in changed[:5])
        messages.warn(
            f"This job goes on with the config it was first started with ({directory}); config"
            f" files have changed since: {shown}"
        )
    with read_write(cfg), open_dict(cfg):
        _overlay(cfg, stored, is_root=True)
        for key, node in policy.items():
            if node is not None:
                OmegaConf.update(cfg, key, node, merge=False, force_add=True)
            elif _node(cfg, key) is not None:  # `~resilience.…`
                above, _, last = key.rpartition(".")
                del OmegaConf.select(cfg, above)[last]


def keep_policy(cfg: DictConfig, directory: Path) -> None:
    """Store what overrides of this start have changed below `resilience`, for the later ones."""
    path = forge_dir(directory) / "overrides.yaml"
    before = _overrides_in(path)
    new = [o for o in _typed(cfg) if _is_policy(_key(o)) and o not in before]
    if not new:
        return
    stored = OmegaConf.load(forge_dir(directory) / "config.yaml")
    assert isinstance(stored, DictConfig)
    stored["resilience"] = _task_config(cfg)["resilience"]
    _store(stored, directory)
    replaced = set(map(_key, new))
    kept = [*(o for o in before if _key(o) not in replaced), *new]
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(kept)))


def _is_policy(key: str) -> bool:
    """Whether a key is one of the policy, which may change from start to start."""
    return f"{key}.".startswith("resilience.")


def _typed(cfg: DictConfig) -> list[str]:
    """The overrides that this start was given, as they were typed."""
    given: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    return [str(one) for one in given]


def _node(cfg: DictConfig, key: str) -> Any:
    """What stands at a key, also where that is null or an interpolation; None: nothing does."""
    node: Any = cfg
    for part in key.split("."):
        node = node._get_node(part) if isinstance(node, DictConfig) else None
    return node


def _overlay(node: Any, stored: Any, is_root: bool = False) -> None:
    """Make `node` hold what is stored, keeping the types that its schema gives it."""
    for key in [key for key in node if key not in stored and not (is_root and key == "hydra")]:
        del node[key]
    for key in stored:
        wanted = stored._get_node(key)
        present = node._get_node(key)
        if _is_plain_dict(wanted) and _is_plain_dict(present):
            _overlay(present, wanted)
            continue
        try:
            # Merged, not assigned: names become enums, and dicts the dataclasses they stand for.
            node.merge_with(OmegaConf.masked_copy(stored, [key]))
        except OmegaConfBaseException as error:
            raise Contradiction(
                f"The stored `{wanted._get_full_key(None)}` no longer fits the schema that the code"
                f" gives it ({str(error).splitlines()[0]}). Put the schema back, or start in a new"
                " directory."
            ) from error


def _is_plain_dict(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (
        node._is_none() or node._is_missing() or node._is_interpolation()
    )


def _overrides_in(path: Path) -> list[str]:
    if not path.exists():
        return []
    # Unresolved: an override may hold an interpolation of the config it was given to.
    typed: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return [str(one) for one in typed]


def _contradicts(override: str, cfg: DictConfig, stored: DictConfig) -> bool:
    """Whether a command-line override asks for something else than what is stored."""
    key = _key(override)
    wanted = OmegaConf.select(cfg, key, throw_on_missing=False)
    if isinstance(wanted, Enum):
        wanted = wanted.name  # as it is stored
    return bool(OmegaConf.create({"v": wanted}) != OmegaConf.create({"v": _select(stored, key)}))


def _key(override: str) -> str:
    """The key that a command-line override sets; a group's name for a choice of a group."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".")


def _select(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_missing=False)


def _as_stored(cfg: DictConfig) -> Any:
    """The user's part of a config as it would be read back from its file."""
    copied = task_part(cfg)
    return OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(copied)), resolve=False)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
