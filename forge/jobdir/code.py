"""The code of a job, to see what changed since its first start.

<job dir>/.forge/code.json     sha256 of each source file that the job imported
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from forge.filesystem.files import make_directory, read_trusted, write_atomically
from forge.jobdir.job_files import CODE, forge_dir


@functools.cache
def installed() -> tuple[str, ...]:
    """The beginnings of the paths of installed files, forge's among them."""
    roots = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = Path(__file__).parents[1]
    roots |= {*site.getsitepackages(), site.getusersitepackages(), str(ours)}
    roots.add(str(ours.parent / "hydra_plugins" / "forge_launcher"))  # in a repository
    return tuple(os.path.join(root, "") for root in roots)


def fingerprint() -> dict[str, str]:
    """Absolute path -> sha256 of every imported source file that is not installed."""
    installed_in = installed()
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed_in):
            continue  # most are installed, and `abspath` takes longer than all the rest
        path = os.path.abspath(file)
        if not path.startswith(installed_in):
            try:
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except OSError:
                continue  # removed since it was imported
    return found


def changed(job_dir: Path, now: dict[str, str] | None = None) -> list[str]:
    """Source files that have changed since the job's first start, which records them.

    `now`: the code's fingerprint, if the caller has computed it for many jobs.
    """
    path = forge_dir(job_dir) / CODE
    now = fingerprint() if now is None else now
    try:
        first: dict[str, str] = dict(json.loads(read_trusted(path)))
    except (FileNotFoundError, ValueError):
        make_directory(path.parent)
        write_atomically(path, json.dumps(now, indent=1))
        return []
    return sorted(file for file, digest in first.items() if now.get(file, digest) != digest)


def changed_files(recorded: Mapping[str, str]) -> list[str]:
    """Source files that differ from their recorded sha256, or that were removed.

    Files in a directory that does not exist here do not count: this can be another machine.
    """

    def has_changed(path: Path, digest: str) -> bool:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() != digest
        except OSError:
            return path.parent.is_dir() and not path.exists()

    return sorted(file for file, digest in recorded.items() if has_changed(Path(file), digest))


def forget(job_dir: Path) -> None:
    """Let the next start record the code again."""
    (forge_dir(job_dir) / CODE).unlink(missing_ok=True)
