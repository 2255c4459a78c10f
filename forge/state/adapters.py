"""Adapts the objects that scripts pass to `forge.Run` to objects with a state_dict."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from forge.errors import ConfigError
from forge.state import generators


@runtime_checkable
class Stateful(Protocol):
    """An object that `forge.Run` saves: a module, optimizer, schedule, scaler, or the like."""

    def state_dict(self) -> dict[str, Any]:
        """The complete state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore the state."""
        ...


class _AcceleratorState:
    """An `accelerate.Accelerator`, whose count of gradient accumulation steps is saved."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.accelerator.step}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.accelerator.step = state_dict["step"]


class _GeneratorState:
    """A random number generator as an object with a state_dict."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        described = generators.described(self.generator)
        assert described is not None
        return described

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        from forge.state import putting_back  # a fresh start restores nothing

        saved = putting_back.generator(state_dict)
        if putting_back.put_generator_back(self.generator, saved) is not self.generator:
            raise ValueError(f"the saved state is of {saved!r}, but this is {self.generator!r}")


def each(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """The objects in lists, tuples and dicts, named by their path: `optimizers.0`, `nets.actor`."""
    if isinstance(one, dict | list | tuple) and not isinstance(one, Stateful):
        for key, inner in one.items() if isinstance(one, dict) else enumerate(one):
            yield from each(f"{name}.{key}", inner)
    else:
        yield name, one


def unwrapped(one: Any) -> Any:
    """The optimizer inside a wrapper that only forwards to it, like Accelerate's and Fabric's."""
    inner = getattr(one, "optimizer", None) if isinstance(one, torch.optim.Optimizer) else None
    has_own = not isinstance(inner, torch.optim.Optimizer) or "param_groups" in vars(one)
    return one if has_own else unwrapped(inner)


def check(one: Any, state: Any) -> None:
    """Check a saved state before it is loaded: that of a generator can be of another machine.

    Raises:
        DamagedCheckpoint: If it is not a valid state.
        StateMismatch: If it cannot be loaded on this machine.
    """
    if isinstance(one, _GeneratorState):
        from forge.state import putting_back

        putting_back.check_generator(state)


def stateful(one: Any) -> Any:
    """A generator or Accelerator as an object with a state_dict; any other object unchanged."""
    if generators.described(one) is not None:
        return _GeneratorState(one)
    if type(one).__name__ == "Accelerator" and hasattr(one, "gradient_state"):
        return _AcceleratorState(one)
    return one


def read_state(name: str, one: Any) -> Any:
    """The state of an object, read for the first time.

    Raises:
        ConfigError: If it raises; at the stop, an error would lose all progress.
    """
    try:
        return one.state_dict()
    except Exception as error:  # from the user's own method
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            [
                f"{name}: {class_name(one)}.state_dict() raised {type(error).__name__}: {error}"
                f" ({place.filename}:{place.lineno}). No checkpoint could be saved. Correct the"
                f" method; or, if the {class_name(one)} wraps another object, give that object to"
                " forge.Run instead."
            ],
            "The state to save",
        ) from error


def class_name(one: object) -> str:
    """The class of an object with its module, as checkpoints name it."""
    return of_main(f"{type(one).__module__}.{type(one).__qualname__}")


def of_main(name: str) -> str:
    """The name, with `__main__` for the `__mp_main__` that the script is in a job of a sweep."""
    return f"__main__.{name[12:]}" if name.startswith("__mp_main__.") else name
