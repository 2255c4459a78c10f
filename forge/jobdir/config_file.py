"""A config as a file: all values are read back exactly, and damage is detected.

The first line contains the checksum of the rest, which is YAML. Values that YAML cannot represent
have a tag: `!enum module:name`, and `!path`.
"""

from __future__ import annotations

import hashlib
import sys
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml  # type: ignore[import-untyped]

from forge.errors import DamagedConfig, ForgeError
from forge.filesystem.files import (
    make_trusted_directory,
    read_plain,
    read_trusted,
    write_atomically,
)
from forge.jobdir.job_files import forge_dir

_HEAD = "# Written by forge, not to be edited. sha256 of all that follows: "


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True  # write a repeated enum twice instead of as a YAML alias

    def text(self, data: str) -> yaml.Node:
        """Quote a string if a YAML parser could read it as another type."""
        is_plain = data.isprintable() and (data[:1].isalpha() or data[:1] in ("/", "_"))
        style = None if is_plain else "'" if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def enum(self, data: Enum) -> yaml.Node:
        # A job of a sweep imports its script as `__mp_main__`.
        module = type(data).__module__.replace("__mp_main__", "__main__")
        return self.represent_scalar("!enum", f"{module}:{type(data).__qualname__}.{data.name}")

    def path(self, data: PurePath) -> yaml.Node:
        return self.represent_scalar("!path", str(data), '"')


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_multi_representer(Enum, _Dumper.enum)
_Dumper.add_multi_representer(PurePath, _Dumper.path)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def enum(self, node: yaml.ScalarNode) -> Enum:
        module, _, qualname = str(node.value).partition(":")
        found: Any = sys.modules.get(module)  # never import: the script must have imported it
        for name in qualname.split("."):
            found = getattr(found, name, None)
        if not isinstance(found, Enum):
            raise yaml.constructor.ConstructorError(
                problem=f"the job was started with {qualname}, which {module} no longer has"
            )
        return found

    def path(self, node: yaml.ScalarNode) -> Path:
        return Path(str(node.value))


_Loader.add_constructor("!enum", _Loader.enum)
_Loader.add_constructor("!path", _Loader.path)


def write(path: Path, content: Any) -> None:
    """Replace the file in one step; it survives a power cut."""
    make_trusted_directory(path.parent)
    text = yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize
    )
    write_atomically(path, f"{_HEAD}{_sum(text.encode())}\n{text}", is_synced=True)


def read(path: Path, *, is_executed: bool = True) -> Any:
    """Read a config that `write` has written.

    Args:
        path: The file.
        is_executed: Whether its content can be executed, like a config's `_target_`.
    Raises:
        Untrusted: If `is_executed`, and another user could have written the file.
        DamagedConfig: If the file is damaged or was edited, or the code lacks an enum.
    """
    whole = read_trusted(path) if is_executed else read_plain(path)
    head, _, data = whole.partition(b"\n")
    expected = head.removeprefix(_HEAD.encode()).decode(errors="replace")
    if expected != _sum(data):
        raise DamagedConfig(
            f"{path} is damaged or was edited: its first line expects the sha256"
            f" {expected[:80]!r}, but the content has {_sum(data)!r}. Restore the file, or start in"
            " a new directory."
        )
    try:
        return yaml.load(data, Loader=_Loader)
    except yaml.YAMLError as error:
        raise DamagedConfig(
            f"{path}: {getattr(error, 'problem', error)}. Restore the code as it was, or start"
            " in a new directory."
        ) from error


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checkpoint_dir(job_dir: Path) -> Path | None:
    """The checkpoint directory of the job in `job_dir`; None if its config does not name one."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = read(forge_dir(job_dir) / "config.yaml", is_executed=False)
        section = tree["resilience"]["checkpoint"]
        # Resolve this by hand, since Hydra does not run here.
        section["dir"] = section["dir"].replace("${hydra:runtime.output_dir}", str(job_dir))
        found = OmegaConf.select(OmegaConf.create(tree), "resilience.checkpoint.dir")
        return Path(job_dir, found)
    except (OSError, ForgeError, LookupError, AttributeError, TypeError, OmegaConfBaseException):
        return None
