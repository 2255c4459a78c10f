"""`hydra.launcher.snapshot`: jobs run from a copy of the code, made when they are submitted.

<sweep dir>/.forge/code/<hash of the content>

The copy has the files that git tracks, and those that it neither tracks nor ignores. Files that git
ignores (data, an environment) are not copied: a symbolic link leads to each, so that relative paths
still work.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from forge.errors import ConfigError
from forge.filesystem.files import make_trusted_directory
from forge.jobdir.job_files import forge_dir
from forge.jobdir.plan import JobPlan
from forge.messages import escape

FOLDER = "code"
_MOST_MIB = 100
_SHOWN = 3
_CACHES = ("__pycache__", ".pyc")


@dataclass(frozen=True)
class CodeSnapshot:
    """A copy of the code."""

    root: Path
    """The top directory of the original."""
    copy: Path

    def apply(self, plan: JobPlan) -> JobPlan:
        """The plan of a job that runs from the copy."""
        main = plan.main
        if main is not None and "path" in main:
            main = main | {"path": self._place(main["path"])}
        return replace(
            plan,
            main=main,
            cwd=self._place(plan.cwd),
            path=[self._place(one) for one in plan.path],
            argv=[self._place(plan.argv[0]), *plan.argv[1:]] if plan.argv else [],
            snapshot=str(self.copy),
        )

    def _place(self, path: str) -> str:
        """The place of a path in the copy; the path itself if it was not copied."""
        original = Path(path)
        if not original.is_absolute() or not original.is_relative_to(self.root):
            return path
        copied = self.copy / original.relative_to(self.root)
        is_own = copied.exists() and copied.resolve().is_relative_to(self.copy.resolve())
        return str(copied) if is_own else path


def moved(plan: JobPlan, sweep_dir: Path) -> JobPlan:
    """The plan of a job whose sweep, and so its copy of the code, is now in another directory."""
    before = Path(plan.snapshot)
    now = forge_dir(sweep_dir) / FOLDER / before.name
    return CodeSnapshot(before, now).apply(plan) if plan.snapshot and now != before else plan


def make(sweep_dir: Path) -> CodeSnapshot:
    """Copy the code of the working directory; an equal copy is used again.

    Raises:
        ConfigError: If the directory is not in a git repository, or the code is too large.
    """
    cwd = Path.cwd()
    root = Path(_git(cwd, "rev-parse", "--show-toplevel").rstrip("\n"))
    tracked = _names(root, "--cached", "--recurse-submodules")
    names = sorted({*tracked, *_names(root, "--others", "--exclude-standard")})
    sweep = Path(os.path.realpath(sweep_dir))
    files = [name for name in names if _is_copied(root / name, sweep)]
    _check_size(root, files)
    digest = hashlib.sha256()
    for name in files:
        path = root / name
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    folder = forge_dir(sweep_dir) / FOLDER
    make_trusted_directory(folder)
    found = CodeSnapshot(root, folder / digest.hexdigest()[:16])
    if not found.copy.exists():
        draft = folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        for name in files:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, draft / name, follow_symlinks=False)
        _link_others(root, draft, sweep, [name for name in names if (root / name).is_dir()])
        draft.rename(found.copy)
    return found


def _is_copied(path: Path, sweep: Path) -> bool:
    is_file = path.is_symlink() or path.is_file()  # a file that was removed is still tracked
    return is_file and not Path(os.path.realpath(path.parent)).is_relative_to(sweep)


def _check_size(root: Path, files: list[str]) -> None:
    sizes = {name: (root / name).lstat().st_size for name in files}
    total = sum(sizes.values())
    if total <= _MOST_MIB * 2**20:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
    shown = ", ".join(f"{escape(name)} ({sizes[name] / 2**20:.0f} MiB)" for name in largest)
    raise _refused(
        f"the code in {root} has {total / 2**20:.0f} MiB, and the limit is {_MOST_MIB} MiB. The"
        f" largest files are {shown}. List in .gitignore what is not code"
    )


def _link_others(root: Path, copy: Path, sweep: Path, folders: list[str]) -> None:
    """Link what is not copied: what git ignores, and other repositories below this one."""
    ignored = _names(root, "--others", "--ignored", "--exclude-standard", "--directory")
    for name in sorted({*(one.rstrip("/") for one in (*ignored, *folders))}):
        original, link = root / name, copy / name
        is_around = sweep.is_relative_to(os.path.realpath(original))
        if name.endswith(_CACHES) or is_around or os.path.lexists(link):
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(original)


def _names(root: Path, *options: str) -> list[str]:
    return [one for one in _git(root, "ls-files", "-z", *options).split("\0") if one]


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except OSError as error:
        raise _refused(f"git cannot be started ({error})") from error
    if done.returncode:
        raise _refused(f"git does not list the code in {folder} ({done.stderr.strip()})")
    return done.stdout


def _refused(problem: str) -> ConfigError:
    text = f"`hydra.launcher.snapshot=true`: {problem}, or set hydra.launcher.snapshot=false."
    return ConfigError([text], "The launcher's configuration")
