"""The hyperparameters that a script builds before a checkpoint is loaded: rates, decays, lengths.

Loading a checkpoint restores the saved hyperparameters, also if a job continues with another config
(`resilience.resume=changed`). The values that the script now builds differently are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:  # most jobs keep their config
    from forge.jobdir.config_changes import Change

_Path = tuple[Any, ...]
_SCALARS = (bool, int, float, str, type(None))
_MOST = 100


class InitialHyperparameters:
    """The current hyperparameters of the registered objects; `record` is for JSON."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects: dict[str, Any] = {
            n: o for n, o in objects.items() if not isinstance(o, torch.nn.Module)
        }
        states = {name: _hyperparameters(one) for name, one in self.objects.items()}
        self.record: dict[str, dict[str, Any]] = {
            name: {"(class)": type(one).__qualname__, **values(states[name])}
            for name, one in self.objects.items()
        }
        for name, one in self.objects.items():
            if isinstance(one, torch.optim.Optimizer):
                self.record[name]["(groups)"] = len(one.param_groups)

    def _is_known(self, name: str) -> bool:
        kinds = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
        return isinstance(self.objects[name], kinds)

    def kept(self, recorded: dict[str, Any]) -> list[Change]:
        """Hyperparameters that loading restores although the script now builds other values.

        Args:
            recorded: The `record` of the job that saved the checkpoint.
        """
        from forge.jobdir.config_changes import Change, changes

        differences = []
        for name in filter(self._is_known, self.record):
            if name not in recorded:
                continue
            changed = changes(recorded[name], self.record[name])
            # Counters and caches begin with an underscore.
            shown = [one for one in changed if not any(p[:1] == "_" for p in one.key.split("."))]
            for one in shown or changed:
                differences.append(Change(f"{name}.{one.key}", one.before, one.now))
        return differences


def _hyperparameters(one: Any) -> Any:
    if isinstance(one, LRScheduler):
        return one.state_dict()
    if not isinstance(one, torch.optim.Optimizer):
        return _without_data(one.state_dict())
    left_out = ("params", "param_names")
    groups = [{k: v for k, v in group.items() if k not in left_out} for group in one.param_groups]
    return {"param_groups": groups}


def _without_data(tree: Any) -> Any:
    """A user's own state can contain an order or a history: too long for a setting."""
    if isinstance(tree, dict | list | tuple) and len(tree) > _MOST:
        return {}
    if isinstance(tree, dict):
        return {key: _without_data(one) for key, one in tree.items()}
    return list(map(_without_data, tree)) if isinstance(tree, list | tuple) else tree


def values(tree: Any) -> dict[str, Any]:
    """The hyperparameters in a state, by dotted key."""
    return {key_of(path): value for path, value in leaves(tree) if "params" not in path}


def key_of(path: _Path) -> str:
    """A path in a state as a dotted key."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def leaves(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Numbers, strings and short lists of them, in JSON form."""
    value = _plain(tree)
    if value is not NotImplemented:
        yield path, value
    elif isinstance(tree, dict):
        for key, one in tree.items():
            if path or key != "state":  # the optimizer's state is trained, not a setting
                yield from leaves(one, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, one in enumerate(tree):
            yield from leaves(one, (*path, index))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _plain(value.item()) if value.dim() == 0 and not value.is_meta else NotImplemented
    if isinstance(value, np.generic) and not isinstance(value, _SCALARS):  # np.float32(0.1)
        return _plain(value.item())
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list | tuple) and value:
        items = [_plain(one) for one in value]
        return NotImplemented if any(one is NotImplemented for one in items) else items
    return NotImplemented
