"""Fingerprints of the variables of a script, apart from what it gave to `forge.Run`.

Read are the locals of all active functions and the globals of all modules, except those of Python
and of installed packages: plain values, tensors, random number generators, iterators, and the
attributes of objects. Reading changes nothing. Equal values in two processes have equal
fingerprints.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import os
import random
import site
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from forge.checkpoint.format import tensor_encoding
from forge.compat import of_torch
from forge.state import generators

_DEPTH = 3
"""Depth of attributes that are searched."""
_LARGE = 1 << 22
"""Values of a tensor beyond which only a part of them is hashed."""
_LONG = 2000
"""Elements of a container beyond which only a part of them is hashed."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range)
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, types.FrameType, types.CodeType)
_NOT_READ = (
    *("torch.", "forge.", "hydra.", "omegaconf.", "tqdm."),
    *("accelerate.", "lightning.", "pytorch_lightning.", "transformers."),
)
"""Packages whose objects' attributes are not searched."""
_MODULE_OWN = frozenset(vars(torch.nn.Module()))
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of installed packages, also of another environment on `PYTHONPATH`."""


class Variable(NamedTuple):
    """One value, and its place in the script."""

    file: str
    function: str
    """Empty for a global variable."""
    path: str
    """Its name, with attributes."""
    fingerprint: str
    shown: str
    """A short description."""
    kind: str
    """`value`, `buffer` (a tensor of a module), `generator`, `iterator` or `stateful`."""


def variables(frame: types.FrameType | None, known: Collection[object]) -> Iterator[Variable]:
    """All variables of the running script.

    Args:
        frame: The innermost frame; its callers follow.
        known: Objects that are saved anyway; only attributes outside their state count.
    """
    reader = _Reader({id(one) for one in known})
    while frame is not None:
        code = frame.f_code
        if is_of_script(code.co_filename):
            is_global = frame.f_locals is frame.f_globals
            yield from reader.read(
                code.co_filename, "" if is_global else code.co_name, frame.f_locals
            )
        frame = frame.f_back
    for name, module in list(sys.modules.items()):
        if name.startswith("torch."):  # `torch.ops` has a file name without a folder
            continue
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_of_script(file):
            yield from reader.read(file, "", vars(module))


def is_of_script(file: str) -> bool:
    """Whether it belongs to neither Python, forge, nor an installed package."""
    is_file = file.endswith(".py") and not file.startswith("<")
    return is_file and not file.startswith(_installed()) and not _PACKAGES & {*file.split(os.sep)}


@functools.cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = [sysconfig.get_path(name) for name in names] + site.getsitepackages()
    return tuple(f"{one}/" for one in [*found, _HERE])


class _Reader:
    """Reads each object once."""

    def __init__(self, known: set[int]) -> None:
        self._known = known
        self._read: set[int] = set()
        self._named: set[int] = set()

    def read(self, file: str, function: str, names: Mapping[str, Any]) -> Iterator[Variable]:
        """The variables of one place."""
        if id(names) in self._read:
            return
        self._read.add(id(names))
        self._named |= {id(value) for value in names.values()}
        for name, value in list(names.items()):
            # An object of the user's can raise anything when it is read.
            with contextlib.suppress(Exception):
                for path, one, kind in self._parts(name, value, _DEPTH):
                    facts = fingerprint(one), _shown(one), kind
                    yield Variable(os.path.abspath(file), function, path, *facts)

    def _parts(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, Any, str]]:
        """The parts that are compared separately: path, value and kind."""
        if isinstance(value, _PLAIN):
            if not path.startswith("__"):
                yield path, value, _kind(value)
            return
        is_ours = type(value).__module__.startswith("forge.") or path.startswith("__")
        if id(value) in self._read or isinstance(value, _NO_STATE) or is_ours:
            return
        if depth < _DEPTH and id(value) in self._named:
            return  # reported under its own name
        self._read.add(id(value))
        if id(value) not in self._known and (_is_one(value) or _reported_state(value) is not None):
            yield path, value, _kind(value)
        if isinstance(value, types.FunctionType):
            for name, one in _defaults(value).items():
                yield from self._parts(f"{path}.{name}", one, depth - 1)
            inner = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            for name, cell in inner.items():
                try:
                    yield from self._parts(f"{path}.{name}", cell.cell_contents, depth - 1)
                except ValueError:  # not assigned yet
                    continue
        elif depth > 0:
            for name, one in _attributes(value).items():
                is_buffer = isinstance(value, torch.nn.Module) and isinstance(one, torch.Tensor)
                for at, part, kind in self._parts(f"{path}.{name}", one, depth - 1):
                    yield at, part, "buffer" if is_buffer else kind


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """The mutable arguments of a script's function."""
    code, values = function.__code__, function.__defaults__ or ()
    if not is_of_script(code.co_filename):
        return {}
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    found = dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
    return {name: one for name, one in found.items() if not isinstance(one, _PLAIN)}


def _is_one(value: Any) -> bool:
    """Whether its content is hashed as a whole."""
    kinds = (torch.Tensor, np.ndarray, np.generic, dict, list, tuple, set, frozenset)
    if isinstance(value, (*kinds, _CACHE)) or _generator_state(value) is not None:
        return True
    return _kind(value) == "iterator" or _is_row(value)


def _is_row(value: Any) -> bool:
    return type(value).__module__ == "collections"


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that can be its state."""
    if isinstance(value, torch.nn.Module):
        found: dict[str, Any] = {}
        for name, one in value.named_modules():
            prefix = f"{name}." if name else ""
            others = _MODULE_OWN | _set_by_libraries(type(one).__mro__)
            own = {key: x for key, x in vars(one).items() if key not in others}
            own |= of_torch.non_persistent_buffers(one)
            found |= {prefix + key: x for key, x in own.items() if not isinstance(x, _CALLABLE)}
        return found
    kind = f"{type(value).__module__}."
    is_read = not kind.startswith(_NOT_READ) or kind.startswith("torch.utils.data.")
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
        own = {key: x for key, x in vars(value).items() if not key.startswith("__")}
        return own if is_of_script(file) else {}
    if not is_read or type(value).__module__ in sys.stdlib_module_names - {"__main__", "argparse"}:
        return {}
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
    own = _class_values(type(value))
    own |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own |= getattr(value, "__dict__", {})
    own = {key: x for key, x in own.items() if key not in _set_by_libraries(type(value).__mro__)}
    is_torch = kind.startswith("torch.")  # for example the iterator of a DataLoader
    return {key: x for key, x in own.items() if not (is_torch and key.startswith("_"))}


def _class_values(kind: type) -> dict[str, Any]:
    """Values in a class of the script: those of an object until the object has its own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    found = vars(kind).items() if is_of_script(file) else ()
    return {key: x for key, x in found if isinstance(x, _PLAIN) and not key.startswith("__")}


@functools.cache
def _set_by_libraries(classes: tuple[type, ...]) -> frozenset[str]:
    """The attributes that methods of installed base classes set, for a class of the script.

    Args:
        classes: The class and its bases.
    """
    files = [getattr(sys.modules.get(one.__module__), "__file__", None) for one in classes]
    if not is_of_script(files[0] or ""):
        return frozenset()
    functions = (
        function
        for one, file in zip(classes, files, strict=True)
        if file is not None and not is_of_script(file)
        for function in vars(one).values()
        if isinstance(function, types.FunctionType)
    )
    steps = (step for one in functions for step in dis.get_instructions(one))
    return frozenset(str(step.argval) for step in steps if step.opname == "STORE_ATTR")


_CACHE = type(functools.cache(len))
_CALLABLE = (types.FunctionType, types.MethodType, torch.nn.Module)


def _reported_state(value: Any) -> Any:
    """The state that the object reports; None if it has none."""
    if isinstance(value, type) or not hasattr(value, "state_dict"):
        return None
    try:
        state = value.state_dict()
    except Exception:  # noqa: BLE001 - it is anybody's
        return None
    if isinstance(value, torch.nn.Module):
        return state, [name for name, one in value.named_modules() if one.training]
    return state


def _generator_state(value: Any) -> Any:
    """The state of a random number generator; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()  # also of a subclass, which cannot be saved
    return (generators.described(value) or {}).get("state")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return "stateful"
    if _generator_state(value) is not None:
        return "generator"
    if hasattr(type(value), "__next__"):
        return "iterator"
    return "stateful" if hasattr(value, "state_dict") else "value"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1:
            return f"{value.item():.6g}"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, _PLAIN):
        return repr(value) if len(repr(value)) < 40 else f"{repr(value)[:36]} …"
    kind = type(value).__name__
    if isinstance(value, _CACHE):
        return f"cache of {value.cache_info().currsize}"
    if _generator_state(value) is not None:
        kind = f"{type(value).__module__.partition('.')[0]}'s {kind}"
    return f"{kind} of {len(value)}" if hasattr(type(value), "__len__") else kind


def fingerprint(value: Any) -> str:
    """A hash that is equal for equal content."""
    digest = hashlib.blake2b(digest_size=12)
    _feed(digest.update, value, set())
    return digest.hexdigest()


def _feed(add: Callable[[bytes], None], value: Any, above: set[int]) -> None:
    """Hash a value; of an unknown object only the type."""
    add(f"<{type(value).__name__}>".encode())
    if isinstance(value, _PLAIN):
        add(repr(value).encode(errors="replace"))
        return
    if id(value) in above:
        return
    above = above | {id(value)}
    if isinstance(value, torch.Tensor):
        for part in tensor_encoding.strided(value.detach()):
            _feed_array(add, part.reshape(-1), tuple(part.shape))
    elif isinstance(value, np.ndarray | np.generic):
        flat = np.asarray(value).reshape(-1)
        if flat.dtype.hasobject:
            _feed(add, flat.tolist(), above)
        else:
            _feed_array(add, flat, np.shape(value))
    elif (state := _generator_state(value)) is not None:
        _feed(add, state, above)
    elif isinstance(value, _CACHE):  # its content is not readable from Python
        add(str(value.cache_info().currsize).encode())
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            add(repr(key).encode(errors="replace"))
            _feed(add, one, above)
    elif isinstance(value, set | frozenset):
        for each in sorted(fingerprint(one) for one in value):
            add(each.encode())
    elif isinstance(value, list | tuple) or _is_row(value):
        many = list(value)
        add(str(len(many)).encode())
        for one in many[:: max(1, len(many) // _LONG)] + many[-8:]:
            _feed(add, one, above)
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None and is_of_script(value.gi_code.co_filename):
            add(str(value.gi_frame.f_lasti).encode())
            _feed(add, dict(value.gi_frame.f_locals), above)
    elif hasattr(type(value), "__next__"):
        _feed(add, _place_of(value), above)
    elif not isinstance(value, type) and (asked := _reported_state(value)) is not None:
        _feed(add, asked, above)
    elif len(above) < 2 * _DEPTH and not isinstance(value, _NO_STATE):
        _feed(add, _attributes(value), above)


def _place_of(iterator: Any) -> Any:
    """The progress of an iterator, as far as it can be read."""
    count = of_torch.num_yielded(iterator)
    if count is not None:
        return count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools deprecates pickling
        try:
            return iterator.__reduce__()[1:]
        except Exception:  # noqa: BLE001 - most cannot say
            return dict(getattr(iterator, "__dict__", {}))


def _feed_array(add: Callable[[bytes], None], flat: Any, shape: tuple[int, ...]) -> None:
    add(f"{flat.dtype}{shape}".encode())
    part = flat[:: max(1, len(flat) // _LARGE)]
    if isinstance(part, torch.Tensor):
        part = part.cpu().contiguous().view(torch.uint8).numpy()
    add(part.tobytes())
