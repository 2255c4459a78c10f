"""A contract test says what forge needs of a part of another library that is not promised."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from typing import Any

import omegaconf
import pytest
import warm

_PACKAGES = {"of_hydra": "hydra-core"}


@contextmanager
def contract(function: Callable[..., Any], *also: Callable[..., Any]) -> Iterator[None]:
    """Fail, where what is within fails, with what the functions say is to be done."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever another version raises
        module = function.__module__.rpartition(".")[2]
        package = _PACKAGES.get(module, module.removeprefix("of_"))
        paths = [*sys.path, *warm.PACKAGES.values()]
        release = "".join(f" {one.version}" for one in distributions(name=package, path=paths))
        told = "\n".join(f"{one.__name__}: {inspect.getdoc(one)}" for one in (function, *also))
        pytest.fail(
            f"{package}{release} no longer does what forge/compat/{module}.py needs of it"
            f" ({type(error).__name__}: {error}).\n{told}",
            pytrace=False,
        )


def register_resolver(name: str, function: Callable[..., Any]) -> None:
    """By the name that OmegaConf's method has: 2.4 warns of the older one."""
    is_old = omegaconf.__version__.startswith("2.3")
    method = "register_new_resolver" if is_old else "register_resolver"
    getattr(omegaconf.OmegaConf, method)(name, function)
