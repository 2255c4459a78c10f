"""Starts of Python for the tests: `torch._dynamo` is imported when it is needed, not before.

The first optimizer of a process imports it (800 modules, as much time as all of torch) to tell it
twice a step that there is nothing to compile. tests/conftest.py puts this folder on PYTHONPATH.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "torch._dynamo"


class Dynamo(ModuleType):
    """Answers what an optimizer asks; whatever else somebody asks is asked of the real module."""

    def graph_break(self, msg=""):
        pass

    def disable(self, fn, recursive=True, *, wrapping=True):
        return fn

    def __getattr__(self, name):
        if NAME not in sys.modules or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)  # the import system looks at a module while it makes it
        if sys.modules[NAME] is self:
            sys.meta_path.remove(Finder)
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls) if name == NAME else None

    @staticmethod
    def create_module(spec):
        return Dynamo(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.insert(0, Finder)
