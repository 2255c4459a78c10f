"""Selects the checkpoints to keep: by the policy, or being read.

The newest `keep_last`, multiples of `keep_every_steps`, the `best.keep` best by
a logged metric, and those that a rollback could need. A directory that does not look like a good
checkpoint (without reading its tensors) does not count, and is not removed.

Readers take a shared lock on the checkpoint's manifest. The lock is a `flock`: a `fcntl.lockf` lock
ends as soon as the process closes any descriptor of the file, which reading the manifest does.
Without locks in the file system nothing is protected; `fence.py` warns about that when
the directory is claimed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from forge import messages
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import Manifest
from forge.config.schema import BestConfig, BestMode, CheckpointConfig
from forge.errors import DamagedCheckpoint, NewerFormat
from forge.filesystem.files import open_file
from forge.filesystem.locks import is_in_place, release_lock, take_lock
from forge.jobdir.job_files import step_of

_PATIENT_SAVES = 3
"""Number of saves without a value of `best.metric` after which forge warns."""


class _Value(NamedTuple):
    """A value of the metric for sorting: the smallest is the best, then the earliest."""

    rank: float
    logged_at: int
    step: int


class CheckpointIndex:
    """An index of a directory's checkpoints, with their manifests cached."""

    def __init__(self) -> None:
        self.damaged: set[str] = set()
        """Names of checkpoints that did not verify."""
        self._manifests: dict[str, tuple[os.stat_result, Manifest]] = {}

    def forget(self, name: str) -> None:
        """Drop the cached manifest: the checkpoint was replaced or removed."""
        self.damaged.discard(name)
        self._manifests.pop(name, None)

    def described(self, path: Path) -> Manifest | None:
        """The manifest of the checkpoint in `path`; None if it is damaged or of another step.

        Raises:
            NewerFormat: If a newer version of forge wrote it: it must not be replaced.
        """
        if path.name in self.damaged:
            return None
        try:
            status = os.lstat(path / manifest.NAME)
            known = self._manifests.get(path.name)
            if known is None or not _is_same(known[0], status):
                known = (status, manifest.read(path))
                self._manifests[path.name] = known
        except (OSError, DamagedCheckpoint):
            self._manifests.pop(path.name, None)
            return None
        return known[1] if known[1].step == step_of(path) else None

    def check_formats(self, paths: list[Path]) -> None:
        """Raise NewerFormat if a newer forge wrote one: it must not be replaced or removed."""
        for path in paths:
            self.described(path)

    def good(self, path: Path) -> Manifest | None:
        """The manifest of the checkpoint in `path` if all its files exist with the right size."""
        described = self.described(path)
        try:
            if described is not None:
                manifest.check_sizes(path, described)
        except DamagedCheckpoint:
            return None
        return described

    def has(self, path: Path) -> bool:
        """Whether the checkpoint is good."""
        return self.good(path) is not None

    def all_good(self, found: list[Path]) -> dict[Path, Manifest]:
        """The good checkpoints among `found`, in the same order; each is checked only once.

        Two checks could differ: a checkpoint that the disk could not read for a moment would not
        be among those to keep, and then look good enough to be removed.
        """
        looks = ((path, self._good_or_none(path)) for path in found)
        return {path: described for path, described in looks if described is not None}

    def _good_or_none(self, path: Path) -> Manifest | None:
        try:
            return self.good(path)
        except NewerFormat:
            return None  # neither counted nor removed


class Retention:
    """Selects the checkpoints that `resilience.checkpoint` keeps, or a rollback could need."""

    def __init__(self, config: CheckpointConfig, keep_back_steps: int | None) -> None:
        self._config = config
        self._keep_back_steps = keep_back_steps
        self._saved_every = config.every_steps or 1
        self._num_without = 0

    def kept(self, good: dict[Path, Manifest], first_bad_step: int | None) -> set[str]:
        """The names of the checkpoints to keep.

        Args:
            good: The good checkpoints, newest first.
            first_bad_step: The first step of the current streak of bad steps, if there is one.
        """
        kept = set(islice((path.name for path in good), max(1, self._config.keep_last)))
        every = self._config.keep_every_steps
        if every:
            kept |= {path.name for path in good if _step(path) % every == 0}
        if self._config.best.metric is not None:
            kept |= self._best(good, self._config.best, self._config.best.metric)
        newest = next(iter(good), None)
        if self._keep_back_steps is not None and newest is not None:
            first_bad = _step(newest) if first_bad_step is None else first_bad_step
            # Only steps that every run of this job saves: the target of a rollback must not
            # depend on when this run was stopped. Younger ones can become the target later.
            for path in (p for p in good if _step(p) % self._saved_every == 0):
                kept.add(path.name)
                if _step(path) <= first_bad - self._keep_back_steps:
                    break
        return kept

    def _best(self, good: dict[Path, Manifest], best: BestConfig, metric: str) -> set[str]:
        """The best by the metric; the earliest if values or evaluations are the same."""
        values = {path: _value(described, metric, best.mode) for path, described in good.items()}
        ranked = sorted((value, path) for path, value in values.items() if value is not None)
        self._tell_if_never_logged(good, metric)
        kept: set[str] = set()
        evaluations: set[tuple[float, int]] = set()
        for value, path in ranked:
            if len(kept) == best.keep:
                break
            if value[:2] not in evaluations:
                evaluations.add(value[:2])
                kept.add(path.name)
        return kept

    def _tell_if_never_logged(self, good: dict[Path, Manifest], metric: str) -> None:
        names = {name for described in good.values() for name in described.metrics}
        if metric in names or self._num_without > _PATIENT_SAVES:
            self._num_without = _PATIENT_SAVES + 1  # there was a value, or forge has warned
            return
        self._num_without += 1
        if self._num_without == _PATIENT_SAVES:
            self._num_without += 1
            logged = f"Logged: {', '.join(sorted(names))}" if names else "Nothing was logged"
            messages.warn(
                f"`resilience.checkpoint.best.metric={metric}`: no checkpoint has a value of this"
                f" metric, so none is kept as the best. {logged}. Pass the metric to run.log()"
                " before the save."
            )


def _step(path: Path) -> int:
    return step_of(path) or 0


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return os.path.samestat(one, other) and one.st_mtime_ns == other.st_mtime_ns


def _value(described: Manifest, metric: str, mode: BestMode) -> _Value | None:
    """The value for sorting; None if it was not logged or is not finite."""
    value = described.metrics.get(metric)
    if value is None or isinstance(value, str):
        return None
    logged_at = described.logged_at.get(metric, described.step)
    return _Value(value if mode is BestMode.min else -value, logged_at, described.step)


PATIENCE_S = 1.0
"""Seconds that a reader waits for the lock while retention is removing the checkpoint."""


@contextlib.contextmanager
def reading_lock(path: Path) -> Iterator[None]:
    """Keep the checkpoint in the directory `path` from being removed while it is read.

    If the manifest is missing or cannot be locked, this does nothing: reading reports the error.
    """
    fd = _lock_shared(path)
    try:
        yield
    finally:
        if fd is not None:
            release_lock(fd)


@contextlib.contextmanager
def removing_lock(path: Path) -> Iterator[bool]:
    """Lock out readers of the checkpoint in `path`; yields False while a process reads it."""
    # Open for writing if allowed: an exclusive lock on NFS requires it.
    fd = _open(path, os.O_RDWR, os.O_RDONLY)
    try:
        yield fd is None or take_lock(fd)
    finally:
        if fd is not None:
            release_lock(fd)


def _lock_shared(path: Path) -> int | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        fd = _open(path, os.O_RDONLY)
        if fd is None:
            return None
        if take_lock(fd, is_shared=True) and is_in_place(fd, path / manifest.NAME):
            return fd
        release_lock(fd)  # removed or replaced between opening and locking
        time.sleep(0.005)
    return None


def _open(path: Path, *modes: int) -> int | None:
    """Open the manifest; None if it is not a regular file that can be opened."""
    for mode in modes:
        with contextlib.suppress(OSError):
            return open_file(path / manifest.NAME, mode)
    return None
