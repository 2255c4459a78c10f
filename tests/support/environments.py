"""Environments with everything that forge needs, but without this repository.

An environment made with access to the outer site-packages would find the outer, editable forge.
So each one is a plain virtual environment in which every distribution of the outer one is linked,
forge's own left out, and whose `.pth` files are not taken along. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from repository import ROOT, run

_OURS = {"forge", "hydra_forge"}


class Environment:
    """A virtual environment in `folder`, without pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.site_packages = (
            folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        )

    @staticmethod
    def make(folder: Path) -> Environment:
        """All third-party packages of the environment that runs the tests."""
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
        made = Environment(folder)
        for outer in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in sorted(Path(outer).iterdir()):
                name = entry.name.partition("-")[0]
                if name in _OURS or entry.suffix == ".pth" or name == "__pycache__":
                    continue
                if name == "hydra_plugins":  # shared by many distributions: link what is inside
                    (made.site_packages / name).mkdir()
                    for plugin in entry.iterdir():
                        if plugin.name != "forge_launcher":
                            (made.site_packages / name / plugin.name).symlink_to(plugin)
                else:
                    (made.site_packages / entry.name).symlink_to(entry)
        return made

    def install(self, *what: str) -> None:
        """With pip, but without its index and without an environment to build in."""
        offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", *offline]
        run([*pip, *what], self.folder, PIP_DISABLE_PIP_VERSION_CHECK="1")


def build_wheel(folder: Path) -> Path:
    """The source distribution, and from that the wheel."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel
