"""`run.state`: values of the user's own, saved and restored with everything else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from forge.checkpoint.format.codec import Encoder
from forge.errors import CheckpointError
from forge.state import generators


class RunState(MutableMapping[str, Any]):
    """A dict of what a training keeps besides its objects: the best metric, a replay buffer.

    Values are numbers, strings, bytes, tensors, arrays of numpy, generators of random numbers
    (`torch.Generator`, `random.Random`, `Generator` and `RandomState` of numpy), and dicts and
    lists of them.

        run.state["best"] = min(run.state.get("best", math.inf), value)

    Entering the Run restores what the last checkpoint holds. A value that is there already (or when
    a rollback restores) is changed in place where it can be, so that names for it stay good. What
    is assigned between there and the first loop is how the first attempt begins: at a resume, what
    was restored takes its place as the loop begins.

    Raises:
        AttributeError: For `run.state.best`: values are items.
        CheckpointError: Naming a value that cannot be saved, as it is assigned.
        TypeError: For a name that is no string.
    """

    __slots__ = ("_restored", "_values")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = {}
        """Until the first loop begins."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"run.state.{name}: values are items: run.state[{name!r}]")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in RunState.__slots__:
            way = f"values are items: run.state[{name!r}] = …"
            if hasattr(value, "state_dict"):
                way = f"what has a state_dict is given to forge.Run(…, {name}={name})"
            raise AttributeError(f"run.state.{name} = …: {way}")
        super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"run.state[{name!r}]: expected a string, found {type(name).__name__}")
        encoder = Encoder()
        encoder.encode(_without_generators(value, [], []), f"run.state.{name}")
        if encoder.sharded:
            raise CheckpointError(
                f"{encoder.sharded[0]}: a DTensor has to be in an object that is given to"
                " forge.Run: of a value nothing tells, at a resume, how it is to be sharded. Keep"
                " its full_tensor() here, or its to_local() for this rank alone."
            )
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"run.state({self._values!r})"

    def capture(self) -> dict[str, Any]:
        """What goes into a checkpoint, by keys that name it in messages."""
        found: list[dict[str, Any]] = []
        values = _without_generators(self._values, [], found)
        return {"run.state": values, "run.state generators": found}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to what was captured.

        Raises:
            StateMismatch: For a generator of a kind that is not known here.
        """
        values = saved.get("run.state", {})
        for one in saved.get("run.state generators", ()):
            *way, last = one["path"]
            holder = values
            for key in way:
                holder = holder[key]
            holder[last] = generators.made(one)
        self._values = _put_back(self._values, values)
        if self._restored is not None:
            self._restored = dict(self._values)

    def begin_loop(self) -> None:
        """What was assigned instead of a restored value was a beginning: it is put back."""
        for name, value in (self._restored or {}).items():
            if self._values.get(name) is not value:
                self._values[name] = _put_back(self._values.get(name), value)
        self._restored = None


def _without_generators(value: Any, path: list[Any], found: list[dict[str, Any]]) -> Any:
    """The same, with None for each generator, whose state is added to `found`."""
    if type(value) is dict:
        return {key: _without_generators(v, [*path, key], found) for key, v in value.items()}
    if type(value) is list:
        return [_without_generators(v, [*path, i], found) for i, v in enumerate(value)]
    described = generators.described(value)
    if described is None:
        return value
    found.append({"path": path, **described})
    return None


def _put_back(live: Any, saved: Any) -> Any:
    """What was saved; in the place of `live` where that is alike and can be changed."""
    if type(live) is not type(saved):
        return saved
    if type(saved) is dict:
        restored = {key: _put_back(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(restored)
        return live
    if type(saved) is list:
        known = [*live, *[None] * (len(saved) - len(live))]
        live[:] = [_put_back(a, b) for a, b in zip(known, saved, strict=False)]
        return live
    if type(saved) is torch.Tensor:
        if (live.shape, live.dtype, live.device) != (saved.shape, saved.dtype, saved.device):
            return saved
        with torch.no_grad():
            return live.copy_(saved)
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(saved) is numpy.ndarray:
        if live.flags.writeable and (live.shape, live.dtype) == (saved.shape, saved.dtype):
            live[...] = saved
            return live
        return saved
    return saved if generators.described(saved) is None else generators.put_back(live, saved)
