"""Environments that the packaging tests share; made once for all test processes."""

import pytest
from environments import Environment, build_wheel, requirements_of
from harness import made_once


@pytest.fixture(scope="session")
def wheel(shared_folder):
    """The built wheel."""
    (path,) = made_once(shared_folder / "dist", build_wheel).glob("*.whl")
    return path


@pytest.fixture(scope="session")
def without_forge(shared_folder, wheel):
    """An environment with what the wheel requires, and nothing else: no forge either."""
    needed = requirements_of(wheel)
    folder = made_once(shared_folder / "without", lambda f: Environment.make(f / "env", needed))
    return Environment(folder / "env")


@pytest.fixture(scope="session")
def with_wheel(shared_folder, wheel):
    """The same, and the wheel."""

    def make(folder):
        Environment.make(folder / "env", requirements_of(wheel)).install(str(wheel))

    return Environment(made_once(shared_folder / "with", make) / "env")
