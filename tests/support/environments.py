"""Environments that hold nothing but what is required of them, and nothing of this repository.

An environment made with access to the outer site-packages would find the outer, editable forge, and
every package of the extras for development. So each one is a plain virtual environment, into which
the distributions that are required, with what these require in turn, are linked file by file, as
their RECORD lists them: those that the outer environment has, which `constraints.txt` has pinned.
Nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import zipfile
from importlib import metadata
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
        for distribution in needed(requirements):
            outer = str(distribution.locate_file(""))
            files = [str(file) for file in distribution.files or ()]
            inside = [file for file in files if ".." not in file]  # scripts start the outer Python
            for parent in {os.path.dirname(file) for file in inside}:
                (made.site_packages / parent).mkdir(parents=True, exist_ok=True)
            for file in inside:
                os.symlink(f"{outer}/{file}", f"{made.site_packages}/{file}")
        return made

    def install(self, *what: str) -> None:
        """With pip: every requirement has to be there, in a version that the constraints allow."""
        offline = ["--quiet", "--no-index", "--no-build-isolation"]
        allowed = ["--constraint", str(ROOT / "constraints.txt")]
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", *offline, *allowed]
        run([*pip, *what], self.folder, PIP_DISABLE_PIP_VERSION_CHECK="1")


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


def build_wheel(folder: Path) -> Path:
    """The source distribution, and from that the wheel."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel
