"""The repository as tests see it: its files, its modules, the Pythons of this machine."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", "outputs", "multirun", "build", "dist", "htmlcov", "__pycache__"}


@functools.cache
def files() -> list[str]:
    """Every file of the repository that git would keep, relative, with or without git."""
    listed = None
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed is not None and listed.returncode == 0:
        found = [name for name in listed.stdout.split("\0") if name]
    else:
        found = [str(path.relative_to(ROOT)) for path in _walk(ROOT)]
    return sorted(name for name in found if (ROOT / name).is_file())


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        is_kept = path.name == ".ci" or path.suffix == ".yaml" or path.name == ".gitignore"
        if path.name in _NOT_OURS or (path.name.startswith(".") and not is_kept):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


@functools.cache
def modules() -> dict[str, Path]:
    """Module name -> file, of everything in `forge` and `hydra_plugins`."""
    found = {}
    for path in [*(ROOT / "forge").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return dict(sorted(found.items()))


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file, made once in a process."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere, in functions and for type checkers too.

    `from forge import rng` counts as `forge.state.rng` where that is a module, else as `forge`.
    """
    known = modules()
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    return found


@functools.cache
def pythons() -> dict[str, str]:
    """Version -> executable, of every supported Python on this machine."""
    found = {}
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")]
    for minor in range(10, 14):
        name = f"python3.{minor}"
        candidates = [shutil.which(name)]
        candidates += [str(p) for root in roots for p in root.glob(f"3.{minor}.*/bin/{name}")]
        if sys.version_info[:2] == (3, minor):
            candidates.insert(0, sys.executable)
        for candidate in candidates:
            if candidate and _runs(candidate):
                found[f"3.{minor}"] = candidate
                break
    return found


def _runs(executable: str) -> bool:
    command = [executable, "-c", "pass"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def clean_environment(**extra: str) -> dict[str, str]:
    """Environment variables without those that point a Python somewhere."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE_"))}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", **extra}


def run(command: list[str], cwd: Path, *, code: int = 0, **env: str) -> str:
    """Run to the end, expect an exit code, return stdout; all output is shown where it differs."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, (
        f"expected exit code {code}, found {done.returncode}: {command}\n"
        f"{done.stdout}\n{done.stderr}"
    )
    return done.stdout
