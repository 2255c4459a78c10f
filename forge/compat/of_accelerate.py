"""Private parts of Accelerate: the objects that an Accelerator has prepared."""

from __future__ import annotations

from typing import Any

_LISTS = {
    "models": "_models",
    "optimizers": "_optimizers",
    "schedules": "_schedulers",
    "objects": "_custom_objects",
}


def prepared(accelerator: Any) -> dict[str, list[Any]]:
    """The models, optimizers and schedules that were prepared, and the registered objects.

    If it goes: see what `Accelerator.save_state` saves.
    """
    return {name: list(getattr(accelerator, attribute)) for name, attribute in _LISTS.items()}


def loaders(accelerator: Any) -> list[Any]:
    """The loaders that were prepared.

    If it goes: see what `Accelerator.prepare_data_loader` keeps.
    """
    return list(accelerator._dataloaders)
