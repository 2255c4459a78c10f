"""The pickle for a job's process: the function to call, and the config to call it with.

Objects that the process can import are pickled by name. It imports the script that was started as
`__main__` under the name `__mp_main__`, as multiprocessing does: the script's classes and enums are
then the same objects in the config, in the function and in spawned DataLoader workers. Objects
without an importable name (a closure, a lambda as a resolver) are pickled by value.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import hydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig

from forge.compat import of_hydra, of_omegaconf
from forge.errors import ConfigError, MainCalled

if TYPE_CHECKING:
    from forge.launch.snapshot import CodeSnapshot


@dataclass(frozen=True)
class _Reference:  # pickles of waiting jobs have this name
    """A function by name: the `depth`-th function inside the decorators of `module.qualname`."""

    module: str
    qualname: str
    depth: int

    def resolve(self) -> Callable[[Any], Any]:
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        for _ in range(self.depth):
            found = found.__wrapped__
        return found  # type: ignore[no-any-return]


def refer_to(function: Callable[[Any], Any]) -> _Reference | Callable[[Any], Any]:
    """A reference to the function if it can be imported by name, otherwise the function."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module) if module else None
    if found is None or (module == "__main__" and main_module() is None):
        return function
    for name in qualname.split("."):
        found = getattr(found, name, None)
    depth = 0
    while found is not None:
        if found is function:
            return _Reference(str(module), qualname, depth)
        found, depth = getattr(found, "__wrapped__", None), depth + 1
    return function


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except that named objects of `__main__` are pickled by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.needs_main = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            found: Any = sys.modules["__main__"]
            for name in obj.__qualname__.split("."):
                found = getattr(found, name, None)
            if found is obj and main_module() is not None:
                self.needs_main = True
                return NotImplemented
        return super().reducer_override(obj)


def main_module() -> dict[str, str] | None:
    """How another process imports this process's `__main__`; None if that is impossible."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # it is `__main__` for `python project/`
        return {"module": spec.name}
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        return None  # a notebook, an interactive session, `python -c`
    return {"path": str(Path(path).absolute())}


class Shared:
    """The content shared by all jobs of a launch, pickled once."""

    def __init__(
        self, function: Callable[[Any], Any], context: Any, snapshot: CodeSnapshot | None = None
    ) -> None:
        """`snapshot`: the copy of the code from which the jobs run; None: the code itself."""
        self.snapshot = snapshot
        reference = refer_to(function)
        common = {"function": reference, "context": context, "singletons": Singleton.get_state()}
        try:
            self.common, needs_main = _dump(common)
        except Exception as error:
            raise ConfigError([_culprit(reference, error)], "The sweep") from error
        in_main = isinstance(reference, _Reference) and reference.module == "__main__"
        self._needs_main = needs_main or in_main
        self._main = main_module()

    def dump(self, config: DictConfig) -> tuple[bytes, dict[str, str] | None]:
        """(a job's own part, how to import `__main__` before unpickling or None)."""
        data, needs_main = _dump(config)
        return data, self._main if needs_main or self._needs_main else None

    def with_config(self, config: DictConfig) -> tuple[bytes, dict[str, str] | None]:
        """(a job's payload, how to import `__main__` before unpickling or None)."""
        data, main = self.dump(config)
        return pickle.dumps({"common": self.common, "config": data}), main


def _culprit(function: Any, error: Exception) -> str:
    """An error that names the object that cannot be pickled."""
    name = "the context that Hydra passes to its launcher"
    resolvers = {f"the resolver `{one}`": it for one, it in of_omegaconf.resolvers().items()}
    for one, part in {**resolvers, "main": function}.items():
        try:
            _dump(part)
        except Exception as problem:  # noqa: BLE001 - whatever the user's object raises
            name, error = one, problem
            break
    return (
        f"{name} cannot be passed to the process of a job ({type(error).__name__}: {error}). It"
        " contains an object that cannot be pickled, such as a lock or an open file: create that"
        " object at the top level of a module, and import it in the function that uses it."
    )


def _dump(content: Any) -> tuple[bytes, bool]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    return buffer.getvalue(), pickler.needs_main


def load(data: bytes) -> tuple[Callable[[Any], Any], Any, DictConfig]:
    """(function, Hydra's context, config); first restores Hydra's singletons."""
    outer = pickle.loads(data)
    common = pickle.loads(outer["common"])
    of_hydra.set_singletons(common["singletons"])
    function = common["function"]
    if isinstance(function, _Reference):
        function = function.resolve()
    return function, common["context"], pickle.loads(outer["config"])


def import_main(main: dict[str, str]) -> None:
    """Import the script (or module) that the sweep was started as."""
    name = "__mp_main__"
    module = types.ModuleType(name)
    is_importing = True
    decorate = hydra.main

    def deferring(*args: Any, **kwargs: Any) -> Any:
        """hydra.main, except that a call of main while the script is imported starts no sweep."""

        def wrap(function: Any) -> Any:
            decorated = decorate(*args, **kwargs)(function)

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if is_importing:
                    raise MainCalled
                return decorated(*args, **kwargs)

            return call

        return wrap

    definition: Any = sys.modules["hydra.main"]
    hydra.main = definition.main = deferring
    try:
        code = _prepare(module, main)
        sys.modules["__main__"] = sys.modules[name] = module
        exec(code, module.__dict__)
    except MainCalled:
        pass
    except SystemExit as error:
        raise ImportError(
            f"{module.__file__} called sys.exit({error.code!r}) while it was imported"
        ) from error
    finally:
        hydra.main = definition.main = decorate
        is_importing = False


def _prepare(module: types.ModuleType, main: dict[str, str]) -> types.CodeType:
    """Compile the script, and set the attributes of the module that imports use."""
    if "module" in main:
        spec = importlib.util.find_spec(main["module"])
        if spec is None or spec.loader is None or spec.origin is None:
            raise ImportError(f"the module {main['module']}, which started the sweep, is not found")
        path = spec.origin
        module.__package__ = spec.parent
        module.__spec__ = spec  # spawned DataLoader workers import the module by its spec
    else:
        path = main["path"]
    module.__file__ = path
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
