"""The objects given to a run: their names and parameters, and their state, captured.

`restoring.py` compares a captured state with them and loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from forge import messages
from forge.checkpoint.format import shards
from forge.checkpoint.store import Store
from forge.errors import ConfigError
from forge.group.collectives import num_ranks
from forge.state import adapters, module_state, structure, unregistered
from forge.state.adapters import Stateful
from forge.state.structure import Structure

_SHOWN = 4
"""Number of parameters that one message lists."""

DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip


class StateRegistry:
    """The registered objects by name.

    Raises:
        ConfigError: If an object has no state to save; names it.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.given = objects = dict(each for one in objects.items() for each in adapters.each(*one))
        """The objects as the user passed them; `objects` has the objects inside wrappers."""
        self.objects: dict[str, Stateful] = {}
        for name, one in objects.items():
            one = adapters.stateful(one)
            if not isinstance(one, Stateful):
                raise ConfigError(
                    [
                        f"forge.Run({name.partition('.')[0]}=…): a {type(one).__name__} has no"
                        " state_dict and load_state_dict, so it cannot be saved. Pass the object"
                        " that has them (the module, the optimizer, …), or add these two methods;"
                        " plain values belong in run.state."
                    ],
                    "The call of forge.Run",
                )
            self.objects[name] = adapters.unwrapped(one)
        self._built: Structure | None = None
        """The structure of the objects as the script built them; None before `check_savable`."""
        self.optimizers = [o for o in self.objects.values() if isinstance(o, torch.optim.Optimizer)]
        """The registered optimizers."""

    def has(self, one: object) -> bool:
        """Whether this very object is registered."""
        return any(known is adapters.unwrapped(one) for known in self.objects.values())

    def name_of(self, one: object) -> str:
        """The name under which an object is registered."""
        return next(n for n, known in self.objects.items() if known is adapters.unwrapped(one))

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers, under each of its names."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                yield from one.named_parameters(prefix=name, remove_duplicate=False)
        for name, one in self.objects.items():
            if isinstance(one, torch.optim.Optimizer):
                for place, parameter in unregistered.with_paths(one):
                    yield f"{name}.{place}", parameter

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules: the registered ones and their submodules."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                yield from one.named_modules(prefix=name)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers once, with a name for messages."""
        seen: set[int] = set()
        for name, parameter in self.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def local_parameters(self) -> Iterator[torch.Tensor]:
        """This rank's part of the parameters."""
        return (shards.local(one) for _, one in self.parameters())

    def capture(self, states: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state of all objects, including gradients that are being accumulated.

        Raises:
            ConfigError: If the loop has changed objects so that no later start could load them.
        """
        for path, one in self.modules():
            module_state.check_reduced(path, one)
        if states is None:
            states = {name: one.state_dict() for name, one in self.objects.items()}
        now = structure.of(self.objects, states)
        built = self._built or now
        structure.check(built, now)
        return {
            "kinds": {name: adapters.class_name(one) for name, one in self.objects.items()},
            "states": states,
            "order": now.order,
            "evaluating": [name for name, one in self.modules() if not one.training],
            "dropout": {name: one.p for name, one in self.modules() if isinstance(one, DROPOUTS)},
            "frozen": [name for name, p in self.parameters() if not p.requires_grad],
            "buckets": self._buckets(),
            "grads": {name: p.grad for name, p in self.parameters() if p.grad is not None},
        }

    def _buckets(self) -> dict[str, list[int]]:
        """The order in which DDP sums gradients over several ranks."""
        if num_ranks() == 1:
            return {}
        from forge.state import ddp_buckets  # most Runs are a single process

        return ddp_buckets.capture(self.objects)

    def read_states(self) -> dict[str, Any]:
        """Read every object's state before the first step.

        Raises:
            ConfigError: If an object raises; names it.
        """
        return {name: adapters.read_state(name, one) for name, one in self.objects.items()}

    def check_savable(self, states: dict[str, Any] | None = None) -> None:
        """Warn of values missing in a captured state; from now on objects must stay as built.

        Args:
            states: The result of `read_states`.
        Raises:
            CheckpointError: If something cannot be saved; names it.
            ConfigError: If an optimizer trains parameters that no object saves; names them.
        """
        for path, module in self.modules():
            module_state.check_kind(path, module)
        states = self.read_states() if states is None else states
        self._built = structure.built(self.objects, states)
        captured = self.capture(states)
        Store.check_savable(captured)
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                module_state.check_loadable(name, captured["states"][name])
                module_state.check_complete(name, one, captured["states"][name])
        if strays := unregistered.strays(self.objects, captured["states"]):
            problem = (
                f"{messages.truncate_list(strays, _SHOWN)}: trained, but in no module given to"
                " forge.Run, so no checkpoint has it. Give that module to forge.Run; put a"
                " parameter of no module into one: parameters=torch.nn.ParameterList([…])."
            )
            raise ConfigError([problem], "The call of forge.Run")
