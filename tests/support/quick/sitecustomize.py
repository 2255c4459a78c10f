"""Starts and ends of Python for the tests: what torch spends on compilers comes when it is needed.

The first optimizer of a process imports `torch._dynamo` (800 modules, as much time as all of torch)
to tell it twice a step that there is nothing to compile; torch itself imports
`torch._meta_registrations` and with it all decompositions, a quarter of its time, for tensors
without data; it looks at the file of each module to find a frame's; and what is loaded for life is
torn down object by object at the end. tests/conftest.py puts this folder on PYTHONPATH.
"""

import atexit
import gc
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Later(ModuleType):
    """Stands for a module until somebody asks for what is in it."""

    def __getattr__(self, name):
        if self.__name__ not in sys.modules or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)  # the import system looks at a module while it makes it
        return getattr(load(self.__name__), name)


class Dynamo(Later):
    """Answers what an optimizer asks, a process group, and DistributedDataParallel."""

    def __getattr__(self, name):
        is_sharded = "torch.distributed.fsdp" in sys.modules  # which needs all of it
        if name in Answers.KNOWN and not is_sharded:
            return Answers(name)
        return super().__getattr__(name)

    def graph_break(self, msg=""):
        pass

    def disable(self, fn, recursive=True, *, reason=None, wrapping=True):
        return fn


class Answers:
    """A module within it, as far as a process group and DistributedDataParallel ask."""

    KNOWN = {  # noqa: RUF012 - typing would be imported for it
        "trace_rules": {"clear_lru_cache": lambda: None},
        "utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},
    }

    def __init__(self, name):
        self.name = name

    def __getattr__(self, asked):
        known = self.KNOWN[self.name]
        return known[asked] if asked in known else getattr(getattr(load(DYNAMO), self.name), asked)


DYNAMO = "torch._dynamo"
LATER = {
    **dict.fromkeys(("torch.distributions", "torch.export", "torch.masked"), Later),
    **dict.fromkeys(("torch.quantization", "torch.nn.intrinsic", "torch.nn.qat"), Later),
    **dict.fromkeys(("torch.nn.quantizable", "torch.nn.quantized"), Later),
    **{DYNAMO: Dynamo, "torch._meta_registrations": Later},
}
BEFORE = {"torch._decomp": "torch._meta_registrations"}


def load(name):
    """The real module, from here on."""
    LATER.pop(name, None)
    if isinstance(sys.modules.get(name), Later):
        del sys.modules[name]
    return importlib.import_module(name)


def at_once(spec):
    """Nobody looks for garbage while it is imported, nor later in what was: all of it stays."""
    if spec is not None:
        execute = spec.loader.exec_module

        def exec_module(module):
            import inspect  # torch needs it, others do not

            def of_frame(asked, *given):
                if inspect.isframe(asked):
                    return sys.modules.get(asked.f_globals["__name__"])
                return really(asked, *given)

            really, inspect.getmodule = inspect.getmodule, of_frame
            gc.disable()
            try:
                execute(module)
            finally:
                gc.freeze()
                gc.enable()
                inspect.getmodule = really

        spec.loader.exec_module = exec_module
    return spec


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch":
            return at_once(PathFinder.find_spec(name, path, target))
        if name in BEFORE:
            load(BEFORE.pop(name))  # which imports the one that is asked for
            module = sys.modules[name]
            module.__spec__ = ModuleSpec(name, Loaded(module))
            return module.__spec__
        return ModuleSpec(name, cls) if name in LATER else None

    @staticmethod
    def create_module(spec):
        return LATER[spec.name](spec.name)

    @staticmethod
    def exec_module(module):
        if module.__name__ == DYNAMO:
            return
        core = sys.modules["torch._C"]
        if hasattr(core, "_set_generator_metaclass"):
            # A module that is not imported would do this, and before it no generator is made.
            core._set_generator_metaclass(sys.modules["torch._opaque_base"].OpaqueBaseMeta)


class Loaded:
    """Gives back a module that was imported meanwhile."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec


sys.meta_path.insert(0, Finder)
atexit.register(gc.freeze)
