"""Which checkpoints are kept.

Those that a person pinned, the newest `keep_last` of the others, multiples of `keep_every_steps`,
the `best.keep` best by a logged metric, and what a rollback may go back to. What is no checkpoint
as far as can be seen without reading tensors has no place among them, and is left where it is.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from forge import messages
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import Manifest
from forge.config.schema import BestConfig, BestMode, CheckpointConfig
from forge.errors import DamagedCheckpoint, NewerFormat
from forge.filesystem.steps import step_of

_PATIENT_SAVES = 3
"""Saves without a value of `best.metric` after which that is logged."""


class _Value(NamedTuple):
    """A value as it is ranked: the smallest is the best, then the first."""

    rank: float
    logged_at: int
    step: int


class Seen:
    """The checkpoints of a directory as far as retention looks at them; manifests are kept."""

    def __init__(self) -> None:
        self.damaged: set[str] = set()
        """Names of those that did not verify."""
        self._manifests: dict[str, tuple[os.stat_result, Manifest]] = {}

    def forget(self, name: str) -> None:
        """Another checkpoint stands there now."""
        self.damaged.discard(name)
        self._manifests.pop(name, None)

    def described(self, path: Path) -> Manifest | None:
        """The manifest of the checkpoint in `path`; None where it has none of its own.

        Raises:
            NewerFormat: For a checkpoint that must not be replaced.
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
        """Raise NewerFormat if one of them must be neither replaced nor removed."""
        for path in paths:
            self.described(path)

    def good(self, path: Path) -> Manifest | None:
        """As `described`, if all files are there, as far as their sizes tell."""
        described = self.described(path)
        try:
            if described is not None:
                manifest.check_sizes(path, described)
        except DamagedCheckpoint:
            return None
        return described

    def has(self, path: Path, *, is_complete: bool) -> bool:
        """Whether one is good, and that of a finished training if it has to be."""
        described = self.good(path)
        return described is not None and (described.is_complete or not is_complete)

    def all_good(self, found: list[Path]) -> dict[Path, Manifest]:
        """Those that are, in the same order, by one look at each.

        A second look may differ: one that a disk could not read for a moment would have no place
        among those that are kept, and then be good enough to be removed.
        """
        looks = ((path, self._good_or_none(path)) for path in found)
        return {path: described for path, described in looks if described is not None}

    def _good_or_none(self, path: Path) -> Manifest | None:
        try:
            return self.good(path)
        except NewerFormat:
            return None  # so it is left where it is


class Retention:
    """What `resilience.checkpoint` keeps, and what a rollback may go back to."""

    def __init__(
        self, config: CheckpointConfig, keep_back_steps: int | None, keep_back_every: int
    ) -> None:
        self._config = config
        self._keep_back_steps = keep_back_steps
        self._keep_back_every = keep_back_every
        self._num_without = 0

    def kept(
        self, good: dict[Path, Manifest], pinned: set[str], first_bad_step: int | None
    ) -> set[str]:
        """The names that stay, of the good ones, newest first, and of those that are pinned.

        Args:
            pinned: Names of those that somebody pinned: they take nobody's place.
            first_bad_step: Where a streak of bad steps began that is under way.
        """
        kept = set(pinned)
        unpinned = (path.name for path in good if path.name not in pinned)
        kept |= set(islice(unpinned, max(1, self._config.keep_last)))
        every = self._config.keep_every_steps
        if every:
            kept |= {path.name for path in good if _step(path) % every == 0}
        if self._config.best.metric is not None:
            kept |= self._best(good, self._config.best, self._config.best.metric)
        newest = next(iter(good), None)
        if self._keep_back_steps is not None and newest is not None:
            begin = _step(newest) if first_bad_step is None else first_bad_step
            # Only those that every run of this job has: where a rollback goes must not depend
            # on when this one was stopped. The younger ones are old enough later.
            for path in (p for p in good if _step(p) % self._keep_back_every == 0):
                kept.add(path.name)
                if _step(path) <= begin - self._keep_back_steps:
                    break
        return kept

    def _best(self, good: dict[Path, Manifest], best: BestConfig, metric: str) -> set[str]:
        """The best ones; of those that hold the same evaluation the first, and of equals too."""
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
            self._num_without = _PATIENT_SAVES + 1  # it was there, or that was logged
            return
        self._num_without += 1
        if self._num_without == _PATIENT_SAVES:
            self._num_without += 1
            logged = f"Logged are {', '.join(sorted(names))}" if names else "Nothing is logged"
            messages.warn(
                f"`resilience.checkpoint.best.metric={metric}`: no checkpoint holds a value of it,"
                f" so none is kept as the best. {logged}; it has to be given to run.log() before"
                " the save."
            )


def _step(path: Path) -> int:
    return step_of(path) or 0


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return os.path.samestat(one, other) and one.st_mtime_ns == other.st_mtime_ns


def _value(described: Manifest, metric: str, mode: BestMode) -> _Value | None:
    """None where it was not logged, or is no finite number: that is never the best."""
    value = described.metrics.get(metric)
    if value is None or isinstance(value, str):
        return None
    logged_at = described.logged_at.get(metric, described.step)
    return _Value(value if mode is BestMode.min else -value, logged_at, described.step)
