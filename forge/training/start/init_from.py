"""Loads the initial weights of a new job from the file or checkpoint in `checkpoint.init_from`.

Only the objects' state is loaded, never the step, the position in the data or random states:
training starts from step 0.

    a checkpoint of forge's               each state goes to the object of that name
    keys are names given to forge.Run     the same, modules only
    a bare state_dict                     to the only module
    a checkpoint of Lightning             its `state_dict`, to the only module

The state of an optimizer or schedule in a file does not name its class, and torch loads that of
another class without an error, so forge loads it only from its own checkpoints.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from forge import messages
from forge.checkpoint import inspection
from forge.checkpoint.format import shards
from forge.config.schema import CheckpointConfig
from forge.errors import CheckpointError, ConfigError, StateMismatch
from forge.jobdir import job_dir
from forge.state import restoring, unregistered
from forge.state.optimizer_state import TensorCopies
from forge.state.registry import StateRegistry

_SHOWN = 8
"""Number of keys that a message lists."""


@dataclass
class _Found:
    """States by the name of their object, and the keys that were not loaded."""

    what: str
    states: dict[str, Any]
    left_out: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    """The classes that the states belong to, if the source names them."""
    unregistered: unregistered.Values = field(default_factory=dict)
    """Parameters that the optimizers trained and no module had."""


def load(config: CheckpointConfig, live: StateRegistry) -> dict[str, Any]:
    """Load the states that `config.init_from` names into the objects; compares first.

    Returns:
        A summary, for the ledger.
    Raises:
        ConfigError: If the file or checkpoint does not exist.
        CheckpointError: If it cannot be read.
        StateMismatch: If a state does not fit. Nothing is loaded then, unless an object itself
            refuses a state that is alike in every leaf.
    """
    assert config.init_from is not None
    key = f"`resilience.checkpoint.init_from={config.init_from}`"
    path = job_dir.started_in() / config.init_from
    if not path.exists():
        raise ConfigError([f"{key}: {path} does not exist."])
    try:
        found = _read_checkpoint(path, config, live) if path.is_dir() else None
        if found is None:
            found = _assign(_read_file(path, is_trusted=config.init_trust_pickle), live)
        _put(found, live)
    except StateMismatch as error:
        raise StateMismatch(
            f"{key}: {error}\nThe run does not start. Parameters missing from {path} would keep"
            " their initial values."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    kept = [name for name in live.objects if name not in found.states]
    messages.say(
        f"Training starts from {', '.join(found.states)} of {path} ({found.what}), at step 0."
        + (f" Not loaded: {'; '.join(found.left_out)}." if found.left_out else "")
        + (f" Left as the script built them: {', '.join(kept)}." if kept else "")
    )
    return {
        "source": str(path),
        "what": found.what,
        "taken": list(found.states),
        "left_out": found.left_out,
        "as_made": kept,
    }


def _read_checkpoint(path: Path, config: CheckpointConfig, live: StateRegistry) -> _Found:
    checkpoint = inspection.load(path, verify=config.verify.name)
    saved = checkpoint.state.get("live")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{checkpoint.path} was not saved by forge.Run")
    states, kinds = saved["states"], saved["kinds"]
    found = _by_name(states, live.objects, f"checkpoint {checkpoint.path.name}")
    if not found.states:
        raise StateMismatch(_nothing_fits(states, live))
    found.kinds = {name: kinds[name] for name in found.states}
    bare = saved.get("unregistered", {})
    found.unregistered = {name: bare[name] for name in found.states if name in bare}
    return found


def _read_file(path: Path, *, is_trusted: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=not is_trusted)
    except pickle.UnpicklingError as error:
        if is_trusted:
            raise CheckpointError(f"{path} is not a torch.save file: {error}") from error
        reason = (
            str(error).strip().splitlines()[-1].strip() if "global" in str(error).lower() else ""
        )
        raise CheckpointError(
            f"{path} contains more than tensors and plain values, or is not a torch.save file"
            f" ({reason or str(error).splitlines()[0]}). Loading such a file can execute code in"
            " it. If you trust the file's author, set `resilience.checkpoint.init_trust_pickle` to"
            " true; else save only the state_dict."
        ) from error
    except Exception as error:  # a pickle can raise any exception
        raise CheckpointError(f"torch.load cannot read {path}: {error}") from error


def _assign(content: Any, live: StateRegistry) -> _Found:
    """Decide which object each part of a file goes to."""
    if not isinstance(content, dict):
        raise StateMismatch(f"expected a dict in the file, found a {type(content).__name__}")
    modules = [name for name, one in live.objects.items() if isinstance(one, torch.nn.Module)]
    found = _by_name(content, modules, "its keys are the names given to forge.Run")
    if found.states:
        return found
    if isinstance(content.get("state_dict"), dict):
        others = [key for key in content if key != "state_dict"]
        name, module = _the_module(live)
        state = _renamed(content["state_dict"], module)
        return _Found(
            "its state_dict",
            {name: state},
            [messages.truncate_list(others, _SHOWN)] if others else [],
        )
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        name, module = _the_module(live)
        return _Found("a state_dict", {name: _renamed(content, module)})
    raise StateMismatch(_nothing_fits(content, live))


def _by_name(content: Mapping[Any, Any], names: Iterable[str], what: str) -> _Found:
    states = {name: content[name] for name in names if isinstance(content.get(name), Mapping)}
    others = [key for key in content if key not in states]
    return _Found(what, states, [messages.truncate_list(others, _SHOWN)] if others else [])


def _the_module(live: StateRegistry) -> tuple[str, torch.nn.Module]:
    modules = [(n, one) for n, one in live.objects.items() if isinstance(one, torch.nn.Module)]
    if len(modules) != 1:
        names = ", ".join(name for name, _ in modules) or "none"
        raise StateMismatch(
            "a state_dict needs exactly one module to go to, but forge.Run was given"
            f" {len(modules)} ({names}). Save a dict with these names as its keys."
        )
    return modules[0]


def _renamed(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """`state` without the common prefix of all its keys, if all keys fit without it."""
    expected, first = set(module.state_dict()), next(iter(state), None)
    for name in expected:
        prefix = first.removesuffix(name) if isinstance(first, str) else ""
        if prefix.endswith(".") and {f"{prefix}{one}" for one in expected} == set(state):
            consume_prefix_in_state_dict_if_present(state, prefix)
            break
    return state


def _put(found: _Found, live: StateRegistry) -> None:
    """Compare everything, then load it."""
    part = StateRegistry({name: live.objects[name] for name in found.states})
    restoring.check(part, {"states": found.states, "kinds": found.kinds})
    restoring.refuse(restoring.stray_differences(live.objects, found.unregistered, is_whole=False))
    given = {"states": found.states, "unregistered": found.unregistered}
    likes = {id(leaf): like.tensor for leaf, like in restoring.shardings(part, given)}
    for name, state in found.states.items():
        restoring.put(part, name, _sharded(state, likes), TensorCopies())
    restoring.load_strays(live.objects, _sharded(found.unregistered, likes))


def _sharded(value: Any, likes: Mapping[int, torch.Tensor]) -> Any:
    """`value`, with each tensor of a sharded target cut to this rank's shard."""
    if id(value) in likes:
        return shards.sharded_like(value, likes[id(value)])
    if isinstance(value, dict):
        found = copy.copy(value)  # with the attributes of a module's state_dict
        found.update((key, _sharded(one, likes)) for key, one in value.items())
        return found
    if type(value) in (list, tuple):
        return type(value)(_sharded(one, likes) for one in value)
    return value


def _nothing_fits(content: Mapping[Any, Any], live: StateRegistry) -> str:
    return (
        f"expected states under the names given to forge.Run ({', '.join(live.objects)}; of a file"
        " those of modules), a state_dict, or a checkpoint of Lightning; found"
        f" {messages.truncate_list(content, _SHOWN) or 'nothing'}"
    )
