"""State as JSON and tensors, exactly, and back, executing nothing.

Whatever `state_dict()` returns is walked as a tree. Plain values go into JSON; what JSON would
change (tuples, integer keys, NaN) is tagged by a key that begins with `!`. Tensors become
references into one flat dictionary. What cannot be kept exactly is refused by its path.
"""

from __future__ import annotations

import base64
import collections
import enum
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from forge.errors import CheckpointError, DamagedCheckpoint

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Encoder:
    """Encodes trees; `tensors` collects every tensor, shared ones once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str = "") -> Any:
        """JSON for `value`.

        Raises:
            CheckpointError: Naming the leaf that cannot be kept.
        """
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:  # Python converts no more than 4300 digits, and those slowly
            return value if value.bit_length() <= 256 else {"!int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": repr(value)}
        if kind is list:
            return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
        if kind is dict:
            return self._dict(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (tuple, set, frozenset, torch.Size):
            items = [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return {f"!{'size' if kind is torch.Size else kind.__name__}": items}
        if kind in (collections.OrderedDict, collections.Counter):
            encoded: dict[str, Any] = {f"!{kind.__name__}": self._pairs(value, path)}
            if hasattr(value, "_metadata"):  # a module's: versions of its layers' formats
                encoded["metadata"] = self.encode(dict(value._metadata), path)
            return encoded
        if isinstance(value, enum.Enum) and _find_class(kind.__module__, kind.__qualname__) is kind:
            known = kind.__members__.get(value.name or "") is value
            content = {"name": value.name} if known else {"value": self.encode(value.value, path)}
            return {"!enum": [kind.__module__, kind.__qualname__], **content}
        if kind in (bytes, bytearray):
            return {f"!{kind.__name__}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"!complex": [self.encode(value.real), self.encode(value.imag)]}
        if kind is torch.dtype:
            return {"!dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"!device": str(value)}
        return self._numpy(value, path)

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("!") for key in value):
            return {key: self.encode(v, _join(path, key)) for key, v in value.items()}
        return {"!dict": self._pairs(value, path)}

    def _pairs(self, value: dict[Any, Any], path: str) -> list[list[Any]]:
        return [
            [self.encode(key, f"{path}<key>"), self.encode(v, _join(path, key))]
            for key, v in value.items()
        ]

    def _numpy(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            raw = base64.b64encode(value.tobytes()).decode()
            return {"!numpy_scalar": [value.dtype.str, raw]}
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            raw_bytes = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
            return {
                "!ndarray": [value.dtype.str, list(value.shape)],
                "bytes": self._tensor(raw_bytes, path),
            }
        raise CheckpointError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved"
            " exactly. Checkpoints hold tensors, arrays, numbers, strings, enums, bytes and"
            " containers of them: let state_dict() return those."
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        problem = _tensor_problem(tensor)
        if problem:
            raise CheckpointError(f"{path}: {problem} cannot be saved yet")
        tensor = tensor.detach()
        shape, stride = tuple(tensor.shape), tensor.stride()
        views = (tensor.is_conj(), tensor.is_neg())  # the same memory, but not the same values
        same = (tensor.data_ptr(), tensor.dtype, shape, stride, views, str(tensor.device))
        name = self._names.get(same) if tensor.numel() else None
        if name is None:
            name = path or "tensor"
            while name in self.tensors or name == "__metadata__":  # safetensors' own
                name += "'"
            self._names[same] = name
            self.tensors[name] = tensor
        encoded: dict[str, Any] = {"!tensor": name}
        if not tensor.is_contiguous() and _is_dense(shape, stride):
            encoded["stride"] = list(stride)
        if tensor.device.type != "cpu":
            encoded["device"] = str(tensor.device)
        return encoded


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter that a lazy module has not made yet (call the module once)"
    if type(tensor) not in _PLAIN_TENSORS:
        return f"a tensor of the subclass {type(tensor).__qualname__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a tensor without data (device meta)"
    return None


def _find_class(module: str, qualname: str) -> object:
    """What the program has under this name; imports nothing."""
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `Encoder.encode` was given.

    Raises:
        DamagedCheckpoint: Where `value` is nothing that an encoder writes.
    """
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("!")), None)
    if tag is None:
        return {key: decode(v, tensors) for key, v in value.items()}
    if tag not in _DECODERS:
        raise DamagedCheckpoint(f"unknown tag {tag!r}: written by a newer forge?")
    try:
        return _DECODERS[tag](value, tensors)
    except _NOT_OURS as error:
        raise DamagedCheckpoint(f"a value tagged {tag!r} cannot be read: {error!r}") from error


_Tensors = dict[str, torch.Tensor]
_NOT_OURS = (
    *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError),
    *(RuntimeError, AssertionError, MemoryError),
)
"""What comes of a value that no encoder writes."""


def _is_here(device: torch.device) -> bool:
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not getattr(module, "is_available", bool)():
        return device.type == "cpu"
    return (device.index or 0) < int(module.device_count())


def _decode_tensor(value: dict[str, Any], tensors: _Tensors) -> torch.Tensor:
    tensor = tensors[value["!tensor"]]
    device = torch.device(value.get("device", "cpu"))
    if not _is_here(device):
        device = torch.device("cpu")  # whoever loads it moves it to where its parameters are
    if "stride" in value:
        if not _is_dense(tuple(tensor.shape), tuple(value["stride"])):
            raise ValueError(f"strides {value['stride']} for the shape {list(tensor.shape)}")
        shaped = torch.empty_strided(tensor.shape, value["stride"], dtype=tensor.dtype)
        tensor = shaped.copy_(tensor)
    return tensor.to(device)


def _decode_ordered(value: dict[str, Any], tensors: _Tensors) -> Any:
    decoded = collections.OrderedDict(_decode_pairs(value["!OrderedDict"], tensors))
    if "metadata" in value:
        decoded._metadata = collections.OrderedDict(  # type: ignore[attr-defined]
            decode(value["metadata"], tensors)
        )
    return decoded


def _decode_pairs(pairs: list[list[Any]], tensors: _Tensors) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors), decode(v, tensors)) for key, v in pairs]


def _decode_enum(value: dict[str, Any], tensors: _Tensors) -> enum.Enum:
    module, qualname = value["!enum"]
    # Only from modules that the program has imported already: loading must not import.
    found: Any = _find_class(module, qualname)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise DamagedCheckpoint(f"{module}.{qualname} is no enum that this program has imported")
    return found[value["name"]] if "name" in value else found(decode(value["value"], tensors))


def _decode_dtype(value: dict[str, Any], tensors: _Tensors) -> torch.dtype:
    found = vars(torch)[value["!dtype"]]  # getattr would import what torch loads late
    if not isinstance(found, torch.dtype):
        raise DamagedCheckpoint(f"torch.{value['!dtype']} is not a dtype")
    return found


def _decode_numpy_scalar(value: dict[str, Any], tensors: _Tensors) -> Any:
    import numpy

    dtype, raw = value["!numpy_scalar"]
    return numpy.frombuffer(base64.b64decode(raw), dtype=dtype)[0]


def _decode_ndarray(value: dict[str, Any], tensors: _Tensors) -> Any:
    import numpy

    dtype, shape = value["!ndarray"]
    raw = bytes(_decode_tensor(value["bytes"], tensors).tolist())
    count = math.prod(shape)
    return numpy.frombuffer(raw, dtype=dtype, count=count).reshape(shape).copy()


_DECODERS: dict[str, Callable[[dict[str, Any], _Tensors], Any]] = {
    "!tensor": _decode_tensor,
    "!OrderedDict": _decode_ordered,
    "!Counter": lambda v, t: collections.Counter(dict(_decode_pairs(v["!Counter"], t))),
    "!dict": lambda v, t: dict(_decode_pairs(v["!dict"], t)),
    "!tuple": lambda v, t: tuple(decode(v["!tuple"], t)),
    "!set": lambda v, t: set(decode(v["!set"], t)),
    "!frozenset": lambda v, t: frozenset(decode(v["!frozenset"], t)),
    "!size": lambda v, t: torch.Size(v["!size"]),
    "!int": lambda v, t: int(v["!int"], 16),
    "!float": lambda v, t: float(v["!float"]),
    "!complex": lambda v, t: complex(*decode(v["!complex"], t)),
    "!bytes": lambda v, t: base64.b64decode(v["!bytes"]),
    "!bytearray": lambda v, t: bytearray(base64.b64decode(v["!bytearray"])),
    "!dtype": _decode_dtype,
    "!device": lambda v, t: torch.device(v["!device"]),
    "!enum": _decode_enum,
    "!numpy_scalar": _decode_numpy_scalar,
    "!ndarray": _decode_ndarray,
}
