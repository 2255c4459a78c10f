"""The checkpoints of one job in one directory.

A save goes: files and manifest in a work directory, each synced; the fence is checked; one rename;
the directory is synced; `latest` is swapped. Whoever dies in between leaves a work directory that
the next attempt removes. Resume takes the newest checkpoint that verifies and tells why it passed
over the others.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import forge
from forge.checkpoint import durable, manifest, reading, tensorfile
from forge.checkpoint.codec import Encoder
from forge.checkpoint.fence import Fence
from forge.checkpoint.manifest import Manifest
from forge.checkpoint.names import LATEST, STATE, TENSORS, step_dirs, step_of
from forge.checkpoint.reading import Checkpoint
from forge.checkpoint.retention import Retention
from forge.checkpoint.workspace import Workspace
from forge.config import CheckpointConfig
from forge.errors import CheckpointError, DamagedCheckpoint


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
            durable.make_directory(directory)
            self._fence = Fence(directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be claimed: {error}") from error
        try:
            self._workspace = Workspace(directory, self._fence)
        except BaseException as error:
            self._fence.release()
            if isinstance(error, OSError):
                raise CheckpointError(f"{directory} cannot be cleaned up: {error}") from error
            raise

    def close(self) -> None:
        """Give the directory up."""
        self._workspace.close()
        self._fence.release()

    # -- reading -------------------------------------------------------------------------------

    def newest(self, at_most: int | None = None, every: int = 1) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None where there is none at all.

        Args:
            at_most: Only those with at most this many steps done.
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
                return self.read(path)
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

    def read(self, path: Path) -> Checkpoint:
        """Read one checkpoint, verifying as `checkpoint.verify` says.

        Raises:
            DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
        """
        return reading.read(path, self._config.verify)

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
        with self._workspace.entered() as work:
            temporary = work / name
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir()
                self._write(temporary, snapshot)
                self._workspace.check()
                self._workspace.put_in_place(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            durable.replace_link(self.directory / LATEST, name, work)
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
        if removed:
            with self._workspace.entered():
                for path in removed:
                    self._workspace.remove(path)
        return [path.name for path in removed]

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of a time line that a rollback to `step` has ended."""
        with self._workspace.entered() as work:
            durable.replace_link(self.directory / LATEST, f"step_{step}", work)
            for path in step_dirs(self.directory):
                if (step_of(path) or 0) > step:
                    self._workspace.remove(path)
            durable.sync_directory(self.directory)
