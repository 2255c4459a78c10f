"""Environments that hold nothing but what is required of them, and nothing of this repository.

An environment made with access to the outer site-packages would find the outer, editable forge, and
every package of the extras for development. So each one is a plain virtual environment, into which
the distributions that are required, with what these require in turn, are linked as their RECORD
lists them: those that the outer environment has, which `constraints.txt` has pinned. A package that
one distribution has alone is one link, and what others may add to is linked file by file. Nothing
is downloaded.
"""

from __future__ import annotations

import csv
import os
import sys
import sysconfig
import zipfile
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from repository import ROOT, run


class Environment:
    """A virtual environment in `folder`, without pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.python = str(self.bin / "python")
        self.site_packages = (
            folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        )

    @staticmethod
    def make(folder: Path, requirements: list[str]) -> Environment:
        """With the distributions that `requirements` need, and no other."""
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
        made = Environment(folder)
        owners = _owners()
        for distribution in needed(requirements):
            outer, linked = str(distribution.locate_file("")), set()
            for file in _files(distribution):
                top, _, rest = file.partition("/")
                if top == ".." or top in linked:  # scripts start the outer Python
                    continue
                if rest and owners[top] == 1 and _is_closed(f"{outer}/{top}"):
                    linked.add(file := top)
                (made.site_packages / file).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(f"{outer}/{file}", f"{made.site_packages}/{file}")
        return made

    def install(self, *what: str) -> None:
        """With pip: every requirement has to be there, in a version that the constraints allow."""
        offline = ["--quiet", "--no-index", "--no-build-isolation"]
        allowed = ["--constraint", str(ROOT / "constraints.txt")]
        # As `pip --python`, which imports pip twice.
        pip = [self.python, os.path.dirname(find_spec("pip").origin), "install", *offline, *allowed]
        run([*pip, *what], self.folder, PIP_DISABLE_PIP_VERSION_CHECK="1")


def _files(distribution: metadata.Distribution) -> list[str]:
    """What its RECORD lists, relative to site-packages; `Distribution.files` takes a second."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    return [row[0] for row in csv.reader(lines)]


def _owners() -> Counter[str]:
    """How many distributions have a folder in the outer site-packages."""
    tops = ({file.partition("/")[0] for file in _files(one)} for one in metadata.distributions())
    return Counter(top for found in tops for top in found)


def _is_closed(folder: str) -> bool:
    """Whether nobody else adds to it: no namespace, such as `hydra_plugins`."""
    return folder.endswith((".dist-info", ".libs")) or os.path.exists(f"{folder}/__init__.py")


def needed(requirements: list[str]) -> list[metadata.Distribution]:
    """The distributions that fulfil them here, and those that these need in turn."""
    todo = [(Requirement(one), "") for one in requirements]
    found, seen = {}, set()
    for requirement, extra in todo:
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        distribution = metadata.distribution(requirement.name)
        found[distribution.name] = distribution
        for wanted in {(requirement.name, one) for one in ("", *requirement.extras)} - seen:
            seen.add(wanted)
            todo += [(Requirement(one), wanted[1]) for one in distribution.requires or ()]
    return list(found.values())


def requirements_of(wheel: Path) -> list[str]:
    """The requirements in the wheel's metadata."""
    name, version, *_ = wheel.name.split("-")
    info = zipfile.Path(wheel, f"{name}-{version}.dist-info/")
    return metadata.PathDistribution(info).requires or []  # type: ignore[arg-type]


BUILD = """
import os, sys, tarfile
from hatchling.build import build_sdist, build_wheel

folder = sys.argv[1]
with tarfile.open(os.path.join(folder, build_sdist(folder))) as packed:
    packed.extractall(folder)
os.chdir(next(one.path for one in os.scandir(folder) if one.is_dir()))
build_wheel(folder)
"""
"""As `python -m build` has it done, in one process; an installer builds the wheel alike."""


def build_wheel(folder: Path) -> Path:
    """The source distribution, and from that the wheel."""
    run([sys.executable, "-c", BUILD, str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel
