"""Who else could have written a checkpoint: another owner, or somebody with the right to write.

Reading one executes nothing, whoever wrote it, and allocates no more than its files hold; but
training would continue from weights that others chose. The rule is that of
`forge/filesystem/foreign.py`; see docs/decisions/0012-trust.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from forge import messages
from forge.checkpoint.format.manifest import Manifest
from forge.config.schema import OnForeign
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem.foreign import foreign

MAX_STATE_BYTES = 1 << 30
"""Bytes of JSON that are read, and written: parsing takes many times as much memory."""


class Trust:
    """What `checkpoint.on_foreign` says, and whether it was logged."""

    def __init__(self, action: OnForeign) -> None:
        self._action = action
        self._has_told = False

    def check(self, path: Path) -> None:
        """A directory, or a file, that is not a checkpoint itself.

        Raises:
            CheckpointError: Where others could have written it and the policy says refuse.
        """
        problem = self._problem(path)
        if problem:
            raise CheckpointError(problem)

    def check_step(self, path: Path) -> None:
        """A checkpoint: the link where it is one, its directory and all files in it.

        Raises:
            DamagedCheckpoint: Where others could have written it and the policy says refuse.
        """
        if self._action is OnForeign.ignore:
            return
        try:
            names = sorted(os.listdir(path))
        except OSError:
            return  # reading it says what is wrong
        for one in (path, *(path / name for name in names)):
            problem = self._problem(one)
            if problem:
                raise DamagedCheckpoint(problem)

    def _problem(self, path: Path) -> str | None:
        """Why `path` is refused; a warning, once, where the policy says no more."""
        if self._action is OnForeign.ignore or (self._has_told and not self._refuses):
            return None
        found = foreign(path)
        if not found:
            return None
        text = (
            f"{path} {found}. Anyone who can write there decides what you train on. Take it over"
            f" (`chown -R`, `chmod -R go-w`), or copy it to a directory of your own; or trust"
            " them: `resilience.checkpoint.on_foreign=ignore`"
        )
        if self._refuses:
            return f"{text} (it is refuse now)."
        self._has_told = True
        messages.warn(f"{text}.")
        return None

    @property
    def directory_mode(self) -> int:
        """Rights of new directories, before the umask: what is refused must not be made."""
        return 0o755 if self._refuses else 0o777

    @property
    def _refuses(self) -> bool:
        return self._action is OnForeign.refuse


def check_state_size(described: Manifest, name: str) -> None:
    """Raise DamagedCheckpoint where the JSON is too large to be parsed."""
    size = described.files[name]["size"]
    if size > MAX_STATE_BYTES:
        raise DamagedCheckpoint(
            f"{name}: expected at most {MAX_STATE_BYTES} bytes of JSON, found {size}"
        )


def check_writable_size(text: bytes) -> None:
    """Raise CheckpointError where the JSON is larger than what would be read again."""
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"The state without its tensors is {len(text)} bytes of JSON; at most"
            f" {MAX_STATE_BYTES} are kept. Let state_dict() return large lists as tensors."
        )
