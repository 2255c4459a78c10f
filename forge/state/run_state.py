"""`run.state`: the user's own values, saved and restored with everything else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from forge.checkpoint.format.encoding import Encoder
from forge.errors import CheckpointError
from forge.state import run_values
from forge.state.run_values import Packed


class RunState(MutableMapping[str, Any]):
    """A dict for what a training keeps apart from its objects: a best metric, a replay buffer.

    Values can be numbers, strings, bytes, tensors, numpy arrays, random number generators
    (`torch.Generator`, `random.Random`, numpy's `Generator` and `RandomState`), and dicts and
    lists of these. One object under two names is still one object after a resume. Views that
    share memory, tensors that require grad, and objects that the Run saves too are refused.

        run.state["best"] = min(run.state.get("best", math.inf), value)

    Entering the Run restores the values of the last checkpoint. Values set before the loop are
    the initial values; on resume the saved ones replace them. A restored value is written into
    the existing object if possible, so that other names of the object stay valid.

    Raises:
        AttributeError: For `run.state.best`: values are items.
        CheckpointError: When a value is assigned that cannot be saved; names it.
        TypeError: If a name is not a string.
    """

    __slots__ = ("_restored", "_values")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = {}
        """The restored values, until the first loop begins."""

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            kind = type(name).__name__
            raise TypeError(f"run.state[{name!r}]: expected a string as the key, found {kind}")
        encoder = Encoder()
        encoder.encode(Packed(value, [name]).tree, f"run.state.{name}")
        if encoder.sharded:
            raise CheckpointError(
                f"{encoder.sharded[0]}: run.state has a DTensor, and forge cannot shard it again"
                " when the job resumes. Give forge.Run the object that has the DTensor (the module,"
                " the optimizer), or put its full_tensor() into run.state. If each rank needs only"
                " its own part, its to_local() is enough."
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
        """The values for a checkpoint, under keys that messages use.

        Raises:
            CheckpointError: If a value would not be restored as it is; names it.
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
            live: Returns the objects' saved state; called only if needed.
        Raises:
            CheckpointError: Names both places.
        """
        found = Packed(self._values, []).found[1:]  # the first is the whole dict
        if found:
            run_values.check_alone(found, given, live())

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore captured values.

        Raises:
            StateMismatch: If a generator cannot be rebuilt here.
        """
        from forge.state import putting_back  # a fresh start restores nothing

        put = putting_back.PuttingBack().put
        self._values = put(self._values, putting_back.unpacked(saved))
        if self._restored is not None:
            self._restored = dict(self._values)

    def begin_loop(self) -> None:
        """Restore again, because assignments since were initial values of a first attempt."""
        restored, self._restored = self._restored, None
        if restored:
            from forge.state import putting_back

            put = putting_back.PuttingBack().put
            for name, value in restored.items():
                self._values[name] = put(self._values.get(name), value)


def copied(state: dict[str, Any], max_bytes: float = math.inf) -> dict[str, Any] | None:
    """A copy of what `RunState.capture` returned; None if it is larger than the limit."""
    from forge.checkpoint.format.decoding import decode  # for epochs, and after a resume

    encoder = Encoder()
    tree = encoder.encode(state)
    size = sum(one.numel() * one.element_size() for one in encoder.tensors.values())
    if size + len(json.dumps(tree)) > max_bytes:
        return None
    tensors = {name: one.clone() for name, one in encoder.tensors.items()}
    found: dict[str, Any] = decode(tree, tensors)
    return found
