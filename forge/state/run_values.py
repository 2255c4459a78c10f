"""Converts the values of `run.state` to the form in a checkpoint, each object once.

In the saved tree, None replaces random number generators and objects that occur a second time;
both are listed separately. `putting_back.py` rebuilds them. Values that would no longer be shared
after a resume are refused: views that share memory, and memory of objects given to forge.Run. The
error names both places.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forge.checkpoint.format.encoding import MAX_DEPTH
from forge.errors import CheckpointError
from forge.state import generators, sharing

_CONTAINERS = (dict, list, set, bytearray, collections.OrderedDict, collections.Counter)
"""Mutable types, for which object identity matters."""

Path = list[Any]


def is_array(value: Any) -> bool:
    """Whether it is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _counts(value: Any) -> bool:
    """Whether it matters if two names refer to one object or to two equal ones."""
    is_data = isinstance(value, torch.Tensor) or is_array(value)
    return is_data or type(value) in _CONTAINERS or generators.is_one(value)


def shown(path: Path) -> str:
    """A path in `run.state`, for messages."""
    return "run.state" + "".join(f"[{k}]" if type(k) is int else f".{k}" for k in path)


class Packed:
    """A tree without generators, in which each object occurs once.

    Raises:
        CheckpointError: If a value would not be restored as it is; names it.
    """

    def __init__(self, values: Any, path: Path) -> None:
        self.generators: list[dict[str, Any]] = []
        """Generators, each with its `path`."""
        self.shared: list[list[Path]] = []
        """The path of an object's second place, and that of its first."""
        self.found: list[tuple[Path, Any]] = []
        """All mutable objects, each once."""
        self._seen: dict[int, tuple[Path, bool]] = {}
        try:
            self.tree = self._pack(values, path, is_fixed=False)
        except RecursionError:
            raise CheckpointError(
                f"{shown(path)}: a value is nested in more than {MAX_DEPTH} containers, which"
                " cannot be saved. Keep its values in one list or dict, or in a tensor."
            ) from None  # a traceback of thousands of lines

    def _pack(self, value: Any, path: Path, *, is_fixed: bool) -> Any:
        """`is_fixed`: whether it is in a container that is saved as a whole, such as a tuple."""
        if len(path) > MAX_DEPTH + 1:
            raise RecursionError
        if _counts(value):
            first, was_fixed = self._seen.setdefault(id(value), (path, is_fixed))
            if first is not path:
                if path[: len(first)] == first:
                    raise CheckpointError(
                        f"{shown(first)} contains itself, as {shown(path)}, so it cannot be saved."
                        " Remove that reference, or keep a copy without that reference in"
                        f" {shown(first)}."
                    )
                if is_fixed or was_fixed:
                    raise CheckpointError(_refusal(shown(first), shown(path), value))
                self.shared.append([path, first])
                return None
            self.found.append((path, value))
        if isinstance(value, torch.Tensor):
            _check_tensor(value, shown(path))
        if type(value) is dict:
            return {k: self._pack(v, [*path, k], is_fixed=is_fixed) for k, v in value.items()}
        if type(value) is list:
            return [self._pack(v, [*path, i], is_fixed=is_fixed) for i, v in enumerate(value)]
        for key, one in _inside(value):
            self._pack(one, [*path, key], is_fixed=True)
        described = None if is_fixed else generators.described(value)
        if described is None:
            return value
        self.generators.append({"path": path, **described})
        return None


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, tuple):
        yield from enumerate(value)
    elif isinstance(value, collections.OrderedDict):
        yield from value.items()


def _check_tensor(value: torch.Tensor, path: str) -> None:
    if value.requires_grad or type(value) is torch.nn.Parameter:
        kind = "a Parameter" if type(value) is torch.nn.Parameter else "a tensor that requires grad"
        raise CheckpointError(
            f"{path}: {kind}. A resume would restore only its values, without the gradient. Keep"
            " a .detach().clone() here. If it is trained, pass its module or its optimizer to"
            " forge.Run."
        )


def _refusal(one: str, other: str, value: Any) -> str:
    if isinstance(value, torch.Tensor) or is_array(value):
        copy = ".copy()" if is_array(value) else ".clone()"
        what, remedy = "share memory", f"Keep a {copy}"
    else:
        what, remedy = f"are the same {type(value).__name__}", "Keep a copy (copy.deepcopy)"
    return (
        f"{one} and {other} {what}. After a resume they would be separate, so a change of one would"
        f" no longer reach the other. {remedy} in run.state, or remove it from there."
    )


def check_alone(found: list[tuple[Path, Any]], given: Mapping[str, Any], live: Any) -> None:
    """Refuse values that share memory with another value, or with an object given to forge.Run.

    Args:
        found: Of `Packed`.
        given: The objects, by name.
        live: Their saved state.
    Raises:
        CheckpointError: Names both places.
    """
    others = {id(one): name for name, one in given.items()}
    others[id(torch.default_generator)] = "torch.default_generator"
    data: list[tuple[str, Any]] = []
    for name, one in _live(live, ""):
        if isinstance(one, torch.Tensor) or is_array(one):
            data.append((name, one))
        others.setdefault(id(one), name)
    for path, one in found:
        if id(one) in others:
            raise CheckpointError(_refusal(shown(path), others[id(one)], one))
    mine = {shown(p): one for p, one in found if isinstance(one, torch.Tensor) or is_array(one)}
    for group in sharing.groups([*mine.items(), *data]) if mine else ():
        own = [name for name in group if name in mine]
        rest = [name for name in group if name not in mine]
        if own and len(group) > 1:
            raise CheckpointError(_refusal(own[0], [*own[1:], *rest][0], mine[own[0]]))


def _live(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if _counts(value):
        yield path, value
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _live(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _live(one, f"{path}[{i}]")
