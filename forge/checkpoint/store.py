"""The checkpoints of one job in one directory.

A save goes: temporary sibling, files, manifest, each synced; the fence is checked; one rename;
the directory is synced; `latest` is swapped. Whoever dies in between leaves a sibling that the
next attempt removes. Resume takes the newest checkpoint that verifies and tells why it passed
over the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import forge
from forge.checkpoint import durable, manifest, reading, tensorfile
from forge.checkpoint.codec import Encoder
from forge.checkpoint.fence import TOKEN_FILE, Fence
from forge.checkpoint.manifest import Manifest
from forge.checkpoint.names import LATEST, STATE, TENSORS, step_dirs, step_of
from forge.checkpoint.reading import Checkpoint, Place
from forge.checkpoint.retention import Retention
from forge.config import CheckpointConfig
from forge.errors import CheckpointError, DamagedCheckpoint

_REPLACED = re.compile(r"\.replaced_(step_\d+)-\d+")
_LEFTOVERS = (".step_", ".removed_", f".{LATEST}.tmp-", f"{TOKEN_FILE}.tmp-")


@dataclass
class Snapshot:
    """State on its way to disk."""

    step: int
    state: Any
    tensors: dict[str, torch.Tensor]
    is_complete: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors."""
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors.values())


class Store:
    """Reads and writes the checkpoints of one directory; claims it until `close`."""

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        attempt: int = 0,
        config_hash: str = "",
        keep_back_steps: int | None = None,
        keep_back_every: int = 1,
    ) -> None:
        """Claim `directory`, creating it, and remove what a killed save left.

        Args:
            directory: Where the `step_<N>` lie.
            config: Retention and verification.
            attempt: Number of this attempt, for the manifest.
            config_hash: Hash of the job's config, for the manifest.
            keep_back_steps: Always keep one checkpoint at least this many steps old.
        Raises:
            DirectoryInUse: Where a live job holds it.
        """
        self.directory = directory
        self._config = config
        self.attempt = attempt
        self._config_hash = config_hash
        self._retention = Retention(config, keep_back_steps, keep_back_every)
        self._damaged: set[str] = set()
        self.passed_over: list[str] = []
        """Why the last `newest` did not take the newer checkpoints."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fence = Fence(directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be claimed: {error}") from error
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove what a killed save left; put back what it was about to replace."""
        for path in self.directory.iterdir():
            replaced = _REPLACED.fullmatch(path.name)
            if replaced and not os.path.lexists(self.directory / replaced[1]):
                os.rename(path, self.directory / replaced[1])
            elif replaced or path.name.startswith(_LEFTOVERS):
                _remove(path)

    def close(self) -> None:
        """Give the directory up."""
        self._fence.release()

    # -- reading -------------------------------------------------------------------------------

    def newest(
        self, at_most: int | None = None, every: int = 1, place: Place | None = None
    ) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None where there is none at all.

        Args:
            at_most: Only those with at most this many steps done.
            place: See `reading.read`.
        Raises:
            CheckpointError: Where there are checkpoints but none of them verifies.
        """
        self.passed_over = []
        candidates = step_dirs(self.directory)
        if at_most is not None:
            candidates = [path for path in candidates if (step_of(path) or 0) <= at_most]
        candidates = [path for path in candidates if (step_of(path) or 0) % every == 0]
        for path in candidates:
            try:
                return self.read(path, place)
            except DamagedCheckpoint as error:
                self._damaged.add(path.name)
                self.passed_over.append(f"{path.name}: {error}")
        if not self.passed_over or at_most is not None:
            return None
        reasons = "".join(f"\n  - {reason}" for reason in self.passed_over)
        raise CheckpointError(
            f"No checkpoint in {self.directory} can be used:{reasons}\nTo start from the first"
            f" step, move these directories away; nothing was changed or removed."
        )

    def read(self, path: Path, place: Place | None = None) -> Checkpoint:
        """Read one checkpoint, verifying as `checkpoint.verify` says.

        Raises:
            DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
        """
        return reading.read(path, self._config.verify, place)

    # -- writing -------------------------------------------------------------------------------

    @staticmethod
    def check_savable(state: Any) -> None:
        """Raise CheckpointError naming a leaf of `state` that cannot be saved."""
        encoder = Encoder()
        encoder.encode(state)
        for name, tensor in encoder.tensors.items():
            tensorfile.check_dtype(name, tensor)

    @staticmethod
    def is_savable(state: Any) -> bool:
        """Whether `check_savable` finds nothing."""
        try:
            Store.check_savable(state)
        except CheckpointError:
            return False
        return True

    def snapshot(self, step: int, state: Any, is_complete: bool, copy: bool) -> Snapshot:
        """Encode `state`; with `copy`, independent of what training does to it afterwards.

        Raises:
            CheckpointError: Naming a leaf that cannot be saved.
        """
        encoder = Encoder()
        tree = encoder.encode(state)
        tensors = encoder.tensors
        if copy:
            tensors = {
                name: tensorfile.storable(t, copy=True) for name, t in encoder.tensors.items()
            }
        return Snapshot(step, tree, tensors, is_complete)

    def commit(self, snapshot: Snapshot) -> Path:
        """Write a snapshot; when this returns it survives a power cut.

        Raises:
            OSError: From the disk; nothing that was there before has changed.
            DirectoryInUse: Where a newer attempt has taken over.
        """
        name = f"step_{snapshot.step}"
        final = self.directory / name
        temporary = self.directory / f".{name}.tmp-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        self._fence.check()
        try:
            temporary.mkdir()
            self._write(temporary, snapshot)
            self._fence.check()
            self._put_in_place(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        durable.sync_directory(self.directory)
        durable.replace_link(self.directory / LATEST, name)
        self._damaged.discard(name)
        return final

    def _write(self, directory: Path, snapshot: Snapshot) -> None:
        text = json.dumps(snapshot.state).encode()
        files = {
            TENSORS: tensorfile.write(directory / TENSORS, snapshot.tensors),
            STATE: tensorfile.write_synced(directory / STATE, iter([memoryview(text)])),
        }
        described = Manifest(
            step=snapshot.step,
            attempt=self.attempt,
            files=files,
            is_complete=snapshot.is_complete,
            config_hash=self._config_hash,
            created=time.time(),
            versions={"forge": forge.__version__, "torch": torch.__version__},
        )
        content = memoryview(described.to_bytes())
        tensorfile.write_synced(directory / manifest.NAME, iter([content]))
        durable.sync_directory(directory)

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        if final.is_symlink() or final.exists():
            # One that does not verify, or that was not complete yet, stands here: see
            # `holds`. It is moved away, not removed, until the new one is in its place; a kill in
            # between is put right by `_clean_up`.
            aside = self.directory / f".replaced_{final.name}-{os.getpid()}"
            _remove(aside)
            os.rename(final, aside)
            try:
                os.rename(temporary, final)
            except BaseException:
                os.rename(aside, final)
                raise
            _remove(aside)
        else:
            os.rename(temporary, final)

    def holds(self, step: int, is_complete: bool) -> bool:
        """Whether a good checkpoint of this step, as complete as asked, is there already."""
        path = self.directory / f"step_{step}"
        if path.name in self._damaged:
            return False
        try:
            described = manifest.read(path)
            manifest.check_sizes(path, described)
        except DamagedCheckpoint:
            return False
        return described.step == step and (described.is_complete or not is_complete)

    # -- removing ------------------------------------------------------------------------------

    def retain(self, first_bad_step: int | None = None) -> list[str]:
        """Remove what the policy does not keep; never the newest good one or what `latest` names.

        Args:
            first_bad_step: Where a streak of bad steps began that is under way.
        Returns:
            The names that were removed.
        """
        good = [path for path in step_dirs(self.directory) if path.name not in self._damaged]
        kept = self._retention.kept(good, first_bad_step)
        kept.add(os.path.basename(os.path.realpath(self.directory / LATEST)))
        removed = [path for path in good if path.name not in kept]
        for path in removed:
            self._remove_step(path)
        return [path.name for path in removed]

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of a time line that a rollback to `step` has ended."""
        durable.replace_link(self.directory / LATEST, f"step_{step}")
        for path in step_dirs(self.directory):
            if (step_of(path) or 0) > step:
                self._remove_step(path)
        durable.sync_directory(self.directory)

    def _remove_step(self, path: Path) -> None:
        # Renamed first: a kill while it is being removed must not leave half a checkpoint.
        aside = self.directory / f".removed_{path.name}-{os.getpid()}"
        _remove(aside)
        os.rename(path, aside)
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
