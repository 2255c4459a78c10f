"""The config of a job's first start: stored, compared, restored.

<job dir>/.forge/config.yaml  the user's part of the config
<job dir>/.forge/start.yaml   the program, its overrides, the config before it was resolved

References to other keys of the config stay references, so that main gets the same config as without
forge. Values of resolvers (`${now:…}`, `${oc.env:…}`) are stored as they were.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from forge import messages
from forge.compat import of_omegaconf
from forge.config import removed
from forge.errors import Contradiction
from forge.jobdir import config_changes, config_file, identity, job_dir
from forge.jobdir.job_files import forge_dir, suffix

_OUTPUT_DIR = "${hydra:runtime.output_dir}"


# -- at the first start ------------------------------------------------------------------------


def resolve_now(node: Any, directory: Path, *, is_root: bool = True) -> None:
    """Replace resolvers by their values, so that main and the stored config get the same values.

    `${now:…}` and the like return another value at each access. Hydra's config must be set, with
    its output directory: `${hydra:…}` differs if a job of a sweep is resumed alone. Paths inside
    `directory`, the job's, are stored relative to it, so that it can be moved.
    """
    with contextlib.ExitStack() as stack:
        if OmegaConf.is_readonly(node):  # a frozen dataclass
            stack.enter_context(read_write(node))
        for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
            child = of_omegaconf.child_of(node, key)
            if is_root and key == "hydra":
                continue
            value = of_omegaconf.value_of(child)
            if isinstance(value, str) and "${" in value:
                _resolve(node, key, directory)
            elif isinstance(child, (DictConfig, ListConfig)) and not _is_special(child):
                resolve_now(child, directory, is_root=False)


def _resolve(node: Any, key: Any, directory: Path) -> None:
    text = of_omegaconf.value_of(of_omegaconf.child_of(node, key))
    resolvers = of_omegaconf.resolver_names(text)
    # OmegaConf's own resolvers depend only on the config and the environment.
    if not any(name == "oc.env" or not name.startswith("oc.") for name in resolvers):
        return
    try:
        value = node[key]
    except Exception:  # noqa: BLE001 - whatever the resolver raises: it does where main reads it
        return
    shown = repr(value)
    is_tree = isinstance(value, (DictConfig, ListConfig))
    if is_tree and ("${" in shown or OmegaConf.get_type(value) not in (dict, list)):
        return  # has a parent or a schema, and cannot be stored in a file
    candidates: list[Any] = [escaped(value) if isinstance(value, str) else value]
    base = str(directory)
    if "hydra" in resolvers and f"{value}/".startswith(f"{base}/"):
        candidates.insert(0, _OUTPUT_DIR + escaped(str(value)[len(base) :]))
    for candidate in [*candidates, text]:
        with contextlib.suppress(Exception):  # an object that a config cannot contain
            node[key] = candidate
            if type(node[key]) is type(value) and repr(node[key]) == shown:
                return


def escaped(text: str) -> str:
    """Escape a string so that OmegaConf reads it back unchanged, with any interpolations."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _is_special(node: Any) -> bool:
    """Whether a container is null, missing or an interpolation, and so has no nodes."""
    return not isinstance(of_omegaconf.value_of(node), (dict, list))


def task_part(cfg: DictConfig) -> DictConfig:
    """The user's part of a config: everything except `hydra`."""
    with read_write(cfg):
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def freeze(cfg: DictConfig, directory: Path, written: dict[str, Any]) -> None:
    """Store the config of a job, unless it is stored already.

    A config that will replace another one is stored separately until forge.Run has accepted it.

    Args:
        written: `identity.as_written` of the config, before it was resolved.
    Raises:
        Contradiction: If another program has stored a config.
    """
    folder = forge_dir(directory)
    if is_frozen(directory):
        check_program(cfg, directory)
        if not wants_change(cfg):
            identity.forget_asked(directory)
            return
        # Replaced, not removed first: each rank writes these files, and rank 0 takes them later.
        folder = identity.asked(directory)
    start = {"program": _program(cfg), "overrides": overrides_of(cfg), "written": written}
    config_file.write(folder / identity.START, start)
    config_file.write(folder / identity.CONFIG, _task_config(cfg, directory))


def _task_config(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """The user's part of the config, in the form in which it is stored."""
    copied = task_part(cfg)
    resolve_now(copied, directory)
    tree: Any = OmegaConf.to_container(copied)
    policy = tree.get("resilience")
    if isinstance(policy, dict) and "resume" in policy:
        policy["resume"] = "same"  # a change is requested for one start, not for later ones
    found: dict[str, Any] = tree
    return found


def wants_change(cfg: DictConfig) -> bool:
    """Whether this start is to continue the job with the config as it is now."""
    wanted = OmegaConf.select(cfg, "resilience.resume", throw_on_missing=False)
    return identity.is_change_wanted() or bool(getattr(wanted, "name", wanted) == "changed")


def _program(cfg: DictConfig) -> str:
    name = JobRuntime.instance().get("name")
    name = cfg.hydra.job.name if name == "UNKNOWN_NAME" else name
    return f"{name} with config {cfg.hydra.job.config_name}"


def overrides_of(cfg: DictConfig) -> list[str]:
    """The user's overrides as typed: iterating over them would resolve interpolations."""
    return job_dir.as_typed(cfg.hydra.overrides.task)


def is_frozen(directory: Path) -> bool:
    """Whether a job was started in this directory before."""
    return (forge_dir(directory) / "config.yaml").exists()


def forget(directory: Path) -> None:
    """Let the next start use its own config."""
    (forge_dir(directory) / "config.yaml").unlink(missing_ok=True)


def check_program(cfg: DictConfig, directory: Path) -> None:
    """Raise Contradiction if another program started the job in this directory."""
    first, now = _started(directory)["program"], _program(cfg)
    if first != now:
        raise Contradiction(
            f"The job in {directory} was started by {first}, but this command starts {now}. Give"
            " each its own directory (`hydra.run.dir`)."
        )


def restore(cfg: DictConfig, directory: Path) -> None:
    """Replace `cfg` by the config of the job's first start; log what has changed since.

    Raises:
        Contradiction: If this is another program, or an override contradicts the stored config.
        DamagedConfig: If the stored config was changed since it was written.
    """
    check_program(cfg, directory)
    tree = config_file.read(forge_dir(directory) / "config.yaml")
    if isinstance(tree.get("resilience"), dict):
        tree["resilience"], gone = removed.without(tree["resilience"])
        if not suffix():
            removed.notify(gone)
    first_overrides = _started(directory)["overrides"]
    stored = OmegaConf.create(tree)
    before = _flat(OmegaConf.to_container(task_part(cfg)))
    after = _flat(tree)
    new = [o for o in overrides_of(cfg) if o not in first_overrides]
    policy = {key: _node(cfg, key) for key in map(_key, new) if _is_policy(key)}
    asked = [o for o in new if _key(o) not in policy]
    differing = _differing(cfg, directory) if asked else ""
    refused = [o for o in asked if _contradicts(o, cfg, stored, is_other=bool(differing))]
    if refused:
        raise Contradiction(
            f"{directory} has a job that was started with another config. Contradicting overrides:"
            f" {messages.escape(' '.join(refused))}.{differing}\nTo resume the job with the"
            f" config of its first start, pass only this override: hydra.run.dir={directory}\nTo"
            " resume it with the new config, add resilience.resume=changed\nTo train both, start in"
            " a new directory."
        )
    overridden = tuple(f"{key}." for key in (*map(_key, first_overrides), *policy))
    changed = sorted(
        key
        for key in before
        if not ("${" in str(before[key]) and ":" in str(before[key]))  # stored as a value
        and repr(before[key]) != repr(after.get(key, ""))
        and not f"{key}.".startswith(overridden)
        and (key in after or not _is_policy(key))  # else a newer forge has added the key
    )
    if changed:
        shown = ", ".join(f"{k}={after.get(k, 'unset')} (now {before[k]})" for k in changed[:5])
        messages.warn(
            f"This job resumes with the config of its first start, which {directory} keeps. Later"
            f" changes of config files have no effect: {shown}. To resume with the new values, add"
            " resilience.resume=changed"
        )
    _overlay(cfg, stored, is_root=True)
    with read_write(cfg), open_dict(cfg):
        for key, node in policy.items():
            if node is not None:
                OmegaConf.update(cfg, key, node, merge=False, force_add=True)
            elif _node(cfg, key) is not None:  # removed by `~resilience.…`
                above, _, last = key.rpartition(".")
                del OmegaConf.select(cfg, above)[last]


def _differing(cfg: DictConfig, directory: Path) -> str:
    before, now = identity.stored(directory), identity.as_written(cfg)
    return config_changes.listed(config_changes.changes(before, now)) if before is not None else ""


def keep_policy(cfg: DictConfig, directory: Path) -> None:
    """Store the changes that overrides of this start make to `resilience`, for later starts."""
    start = _started(directory)
    before = start["overrides"]
    new = [o for o in overrides_of(cfg) if _is_policy(_key(o)) and o not in before]
    if not new or wants_change(cfg):
        return
    path = forge_dir(directory) / identity.CONFIG
    policy = {"resilience": _task_config(cfg, directory)["resilience"]}
    config_file.write(path, config_file.read(path) | policy)
    replaced = set(map(_key, new))
    start["overrides"] = [*(o for o in before if _key(o) not in replaced), *new]
    config_file.write(_start_path(directory), start)


def _is_policy(key: str) -> bool:
    """Whether a key belongs to the policy, which can change from start to start."""
    return f"{key}.".startswith("resilience.")


def _node(cfg: DictConfig, key: str) -> Any:
    """The node at a key, also if it is null or an interpolation; None if there is none."""
    node: Any = cfg
    for part in key.split("."):
        is_dict = isinstance(node, DictConfig)
        node = of_omegaconf.child_of(node, part) if is_dict else None
    return node


def _start_path(directory: Path) -> Path:
    return forge_dir(directory) / identity.START


def _started(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = config_file.read(_start_path(directory))
    return found


def _overlay(node: Any, stored: Any, *, is_root: bool = False) -> None:
    """Set `node` to the stored value, keeping the types of its schema."""
    with read_write(node), open_dict(node):
        for key in [key for key in node if key not in stored and not (is_root and key == "hydra")]:
            del node[key]
        for key in stored:
            _overlay_key(node, stored, key)
        content = of_omegaconf.value_of(node)
        for key in stored:  # in the stored order
            content[key] = content.pop(key)


def _overlay_key(node: Any, stored: Any, key: Any) -> None:
    wanted = of_omegaconf.child_of(stored, key)
    present = of_omegaconf.child_of(node, key)
    if all(isinstance(one, DictConfig) and not _is_special(one) for one in (wanted, present)):
        _overlay(present, wanted)
        return
    if present is None:
        slot = of_omegaconf.element_type(node)
    else:
        slot = of_omegaconf.declared_type(present)
    try:
        if slot is Any:
            node[key] = wanted
            return
        if OmegaConf.is_interpolation(node, key):
            node[key] = "???"  # else the merge would change the node that it refers to
        # Merged, not assigned: dicts become the dataclasses of the schema.
        node.merge_with(OmegaConf.masked_copy(stored, [key]))
    except OmegaConfBaseException as error:
        raise Contradiction(
            f"The stored value of `{of_omegaconf.full_key(wanted)}` does not fit the type that the"
            f" code now declares for it ({str(error).splitlines()[0]}). Restore the declaration, or"
            " start in a new directory."
        ) from error


def _contradicts(override: str, cfg: DictConfig, stored: DictConfig, *, is_other: bool) -> bool:
    """Whether a command-line override contradicts the stored config.

    Args:
        is_other: Whether the whole config differs; decides about a group choice whose content
            can be anywhere in the config (`experiment=big`).
    """
    key = _key(override)
    if _node(cfg, key) is None and _node(stored, key) is None:
        return is_other
    return bool(_select(cfg, key) != _select(stored, key))


def _key(override: str) -> str:
    """The key that a command-line override sets; for a group choice, its package."""
    group, _, package = override.lstrip("+~").partition("=")[0].partition("@")
    return (package or group).replace("/", ".")


def _select(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_missing=False)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
