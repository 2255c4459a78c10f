"""Private parts of other libraries stand in `forge/compat`, each with a contract test."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from contracts import contract
from private_parts import private_parts
from repository import modules

from forge.compat import of_omegaconf

HERE = Path(__file__).parent
LIBRARIES = sorted(name for name in modules() if name.startswith("forge.compat."))


def functions(library):
    module = importlib.import_module(library)
    members = vars(module).values()
    return [one for one in members if inspect.isfunction(one) and one.__module__ == library]


def test_private_parts_of_others_are_touched_in_compat_alone():
    """What breaks with a new version of torch or Hydra is then in one place, with a way out."""
    others = {name: path for name, path in modules().items() if name not in LIBRARIES}
    found = [f"{path}:{place}" for name, path in others.items() for place in private_parts(path)]
    assert not found, "\n".join(["Put it into forge/compat, with a contract test:", *found])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch._foreach_copy_(a, b)", True),
        ("from hydra._internal.utils import run_and_report", True),
        ("from torch.nn import _reduction", True),
        ("import submitit.core._submit", True),
        ("getattr(module, '_parameters', None)", True),
        ("vars(module)['_parameters']", True),
        ("from forge.config.conversion import _leaves", True),
        ("class A(B):\n    def f(self): return self._executor", True),
        ("class A:\n    def f(self, other): self._own = other._own", False),
        ("import os\nos._exit(0)", False),
        ("pair._asdict()", False),
        ("module.__dict__", False),
        ("[_ for _ in range(3)]", False),
    ],
)
def test_what_is_private_is_found(tmp_path, line, found):
    """The test above must be able to fail, and only where it should."""
    path = tmp_path / "module.py"
    path.write_text(f"{line}\n")
    assert bool(private_parts(path)) is found


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_says_what_to_do_if_it_goes_and_has_a_contract(library):
    """Whoever sees a contract broken has not read the code that needs it."""
    tests = (HERE / f"test_{library.rpartition('.')[2]}.py").read_text()
    for one in functions(library):
        assert re.search(r"^If it goes: ", inspect.getdoc(one), re.MULTILINE), one.__name__
        assert re.search(rf"contract\([^)]*\b{one.__name__}\b", tests), one.__name__


def test_every_compat_module_holds_something():
    """The tests above say nothing about a folder that was moved."""
    assert LIBRARIES
    assert all(map(functions, LIBRARIES))
    assert any(private_parts(modules()[library]) for library in LIBRARIES)


def test_a_broken_contract_says_what_to_do():
    """That is the point of it."""
    with pytest.raises(pytest.fail.Exception) as failed, contract(of_omegaconf.full_key):
        of_omegaconf.full_key(None)
    assert "If it goes: pass the key along" in str(failed.value)
    assert "omegaconf 2." in str(failed.value)
