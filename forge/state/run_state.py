"""`run.state`: values of the user's own, saved and restored with everything else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from forge.checkpoint.format.codec import Encoder, decode
from forge.errors import CheckpointError
from forge.state import run_values
from forge.state.run_values import Packed, PuttingBack


class RunState(MutableMapping[str, Any]):
    """A dict of what a training keeps besides its objects: the best metric, a replay buffer.

    Values are numbers, strings, bytes, tensors, arrays of numpy, generators of random numbers
    (`torch.Generator`, `random.Random`, `Generator` and `RandomState` of numpy), and dicts and
    lists of them. One object under two names is one after a resume. Views of one memory, tensors
    that require grad, and what objects of the Run hold as well are rejected, naming both.

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
        encoder.encode(Packed(value, [name]).tree, f"run.state.{name}")
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
        """What goes into a checkpoint, by keys that name it in messages.

        Raises:
            CheckpointError: Naming a value that would come back as another.
        """
        packed = Packed(self._values, [])
        return {
            "run.state": packed.tree,
            "run.state generators": packed.generators,
            "run.state shared": packed.shared,
        }

    def check_alone(self, given: Mapping[str, Any], live: Callable[[], Any]) -> None:
        """Refuse values that share memory with each other, or with objects given to forge.Run.

        Args:
            given: The objects, by name.
            live: Returns what is saved of them; asked only if that counts.
        Raises:
            CheckpointError: Naming both.
        """
        found = Packed(self._values, []).found[1:]  # the first is all of it
        if found:
            run_values.check_alone(found, given, live())

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to what was captured.

        Raises:
            StateMismatch: For a generator that cannot be made here.
        """
        self._values = PuttingBack().put(self._values, run_values.unpacked(saved))
        if self._restored is not None:
            self._restored = dict(self._values)

    def begin_loop(self) -> None:
        """What was assigned instead of a restored value was a beginning: it is put back."""
        put = PuttingBack().put
        for name, value in (self._restored or {}).items():
            self._values[name] = put(self._values.get(name), value)
        self._restored = None


def copied(state: dict[str, Any], max_bytes: float = math.inf) -> dict[str, Any] | None:
    """What `RunState.capture` gave, with memory of its own; None if it is larger than that."""
    encoder = Encoder()
    tree = encoder.encode(state)
    size = sum(one.numel() * one.element_size() for one in encoder.tensors.values())
    if size + len(json.dumps(tree)) > max_bytes:
        return None
    tensors = {name: one.clone() for name, one in encoder.tensors.items()}
    found: dict[str, Any] = decode(tree, tensors)
    return found
