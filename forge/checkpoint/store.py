"""The checkpoints of one job in one directory.

A save writes and syncs files and manifest in a work directory (`writing.py`), checks that no
newer attempt has taken over, renames the directory into place, syncs, and updates `latest`. If the
process dies in between, the next attempt removes the work directory. A resume loads the newest
checkpoint that verifies and reports why it skipped newer ones.
One module, since reading, writing and removing share one claim and one exchange between ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from forge._version import __version__
from forge.checkpoint import writing
from forge.checkpoint.format import manifest, tensorfile
from forge.checkpoint.format.encoding import Encoder, state_text
from forge.checkpoint.format.manifest import FINAL, LATEST, Files, Logged, Manifest, Origin
from forge.checkpoint.retention import CheckpointIndex, Retention
from forge.checkpoint.staging import Snapshot, StagingPool
from forge.checkpoint.workspace import Workspace
from forge.config.schema import CheckpointConfig
from forge.errors import CheckpointError
from forge.filesystem import durable
from forge.group.group import Coordinator, Exchange
from forge.jobdir.job_files import step_dirs, step_of

if TYPE_CHECKING:
    from forge.checkpoint.reading import Checkpoint, Offer

_ALONE = Coordinator()
_UNKNOWN = Origin()
_START = "the start of a save"
"""The first exchange of a save: a rank that has nothing to save raises here."""

_Made = TypeVar("_Made")


class Store:
    """Reads and writes the checkpoints of one directory; claims it until `close`."""

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        keep_back_steps: int | None = None,
        ranks: Coordinator = _ALONE,
        personal: Collection[str] = (),
    ) -> None:
        """Claim `directory`, creating it, and remove what a killed save left.

        Only rank 0 claims, publishes and removes; its Store must be created before the others'.

        Args:
            directory: The directory that contains the `step_<N>`.
            config: Retention and verification.
            keep_back_steps: Always keep one checkpoint at least this many steps old.
            ranks: The ranks that save here together.
            personal: Keys of the state that stay with each rank if the number of ranks changes.
        Raises:
            DirectoryInUse: If a running job uses the directory.
        """
        self.directory = directory
        self._retention = Retention(config, keep_back_steps)
        self._staging = StagingPool()
        self._seen = CheckpointIndex()
        self.passed_over: list[str] = []
        """The reasons for which the last call of `newest` skipped newer checkpoints."""
        self._verify = config.verify
        self._personal = personal
        self._exchange = Exchange(ranks, "store")
        self._workspace = Workspace(directory) if ranks.rank == 0 else None

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank that saves here."""
        return self._exchange.ranks.size == 1

    def close(self) -> None:
        """Release the directory."""
        self._staging.close()
        if self._workspace is not None:
            self._workspace.close()

    # -- reading -------------------------------------------------------------------------------

    def newest(
        self, at_most: int | None = None, every: int = 1, offer: Offer | None = None
    ) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None if there are no checkpoints.

        Args:
            at_most: Consider only checkpoints of this step or earlier.
            every: Consider only checkpoints at multiples of this many steps.
            offer: Offers live tensors to read into; None: allocate new tensors.
        Returns:
            The checkpoint, or None.
        Raises:
            CheckpointError: If there are checkpoints but none of them verifies.
            NewerFormat: If any of them was written by a newer version of forge.
        """
        names = self._exchange.broadcast("the list of checkpoints", self._names)
        steps = {self.directory / name: step_of(self.directory / name) or 0 for name in names}
        most = max(steps.values(), default=0) if at_most is None else at_most
        wanted = [path for path, step in steps.items() if step % every == 0 and step <= most]
        self.passed_over = []
        if not wanted:
            return None
        from forge.checkpoint import reading  # a fresh start reads nothing

        found, damaged = reading.first_good(
            wanted,  # each rank reads its own part; an error on one rank is raised on all
            lambda path: self.on_all(f"reading {path.name}", lambda: self.read(path, offer)),
        )
        self._seen.damaged.update(path.name for path in damaged)
        self.passed_over = [f"{path.name}: {error}" for path, error in damaged.items()]
        if found is not None or not damaged or at_most is not None:
            return found
        reasons = "".join(f"\n  - {reason}" for reason in self.passed_over)
        raise CheckpointError(
            f"No checkpoint in {self.directory} can be used:{reasons}\nTo start from the first"
            f" step, move these directories away; nothing was changed or removed."
        )

    def _names(self) -> list[str]:
        try:
            found = step_dirs(self.directory)
            self._seen.check_formats(found)  # training would reach these steps and replace them
            return [path.name for path in found]
        except OSError as error:  # not the same as an empty directory
            raise CheckpointError(f"{self.directory} cannot be read: {error}") from error

    def read(self, path: Path, offer: Offer | None = None) -> Checkpoint:
        """Read one checkpoint, with the verification of `checkpoint.verify`.

        Args:
            path: Its directory.
            offer: Offers live tensors to read into; None: allocate new tensors.
        Returns:
            The checkpoint.
        Raises:
            DamagedCheckpoint: Names the damaged file, what was expected and what was found.
        """
        from forge.checkpoint import reading

        ranks = self._exchange.ranks
        return reading.read(
            path,
            offer,
            self._verify,
            rank=ranks.rank,
            size=ranks.size,
            personal=self._personal,
        )

    # -- writing -------------------------------------------------------------------------------

    @staticmethod
    def check_savable(state: Any) -> None:
        """Check that a state can be saved and read again.

        Args:
            state: The state that would be saved.
        Raises:
            CheckpointError: Names a leaf that cannot be saved, or the limit that is exceeded.
        """
        encoder = Encoder()
        tree = encoder.encode(state)
        state_text(tree)
        tensorfile.Layout(encoder.tensors)

    def snapshot(
        self,
        step: int,
        state: Any,
        *,
        copy: bool,
        is_final: bool = False,
        replaces: bool = True,
        origin: Origin = _UNKNOWN,
    ) -> Snapshot:
        """Encode a state; `commit` writes it now or later.

        If there is too little memory for a copy, the snapshot's `is_independent` is False.

        Args:
            step: Steps done.
            state: Nested dicts, lists, tuples, tensors, arrays and values.
            copy: Copy the tensors, so that training can change them before the commit.
            is_final: Whether it is the state after the code that follows the last loop.
            replaces: Whether to replace a good checkpoint of this step.
            origin: For the manifest.
        Returns:
            The snapshot.
        Raises:
            CheckpointError: Names a leaf that cannot be saved.
        """
        encoder = Encoder()
        tree = encoder.encode(state)
        file = self._staging.stage(encoder.tensors, copy=copy)
        return Snapshot(step, tree, file, encoder.unshared, origin, is_final, replaces)

    def commit(self, snapshot: Snapshot, flush: Callable[[], None] | None = None) -> Path | None:
        """Write a snapshot; once this returns, the checkpoint survives a power cut.

        Args:
            snapshot: A snapshot that was not committed before.
            flush: Called first; flushes files that must be on disk before the checkpoint is.
        Returns:
            The directory of the checkpoint, or None if a good one was there already.
        Raises:
            OSError: From the disk of any rank; existing checkpoints are unchanged.
            DirectoryInUse: If a newer attempt has taken over.
        """
        assert not snapshot.file.is_spent, "its memory can already have the copy of another step"
        final, workspace = self.directory / snapshot.name, self._workspace
        with contextlib.ExitStack() as stack:

            def start() -> str | None:
                if flush is not None:
                    flush()
                if workspace is None or (not snapshot.replaces and self._seen.has(final)):
                    return None
                return str(stack.enter_context(workspace.new_folder(final.name)))

            # Wait until all ranks have copied: writing would take cores from them.
            started = self._exchange.all_gather(_START, start)[0]
            if started is not None:
                folder = Path(started)
                check = None if workspace is None else workspace.check
                files = writing.write_all(self._exchange, folder, snapshot, check)
                publish = functools.partial(self._publish, folder, final, files, snapshot)
                self._exchange.broadcast("the commit of a save", publish)
        snapshot.file.release()  # after a failure the caller can try again
        self._seen.forget(final.name)
        return final if started is not None else None

    def fail_save(self, error: BaseException) -> NoReturn:
        """Raise an error on all ranks that save, since this one has no snapshot to commit.

        Args:
            error: Raised here; the other ranks get one with its text.
        Raises:
            BaseException: The error, or a more important one of another rank.
        """

        def fail() -> NoReturn:
            raise error

        self.on_all(_START, fail)
        raise error  # not reached: `on_all` raises it, or the error of another rank

    def on_all(self, what: str, make: Callable[[], _Made]) -> _Made:
        """Call `make` on every rank; if it raises on one rank, this raises on all.

        Args:
            what: Names the call in the error if a rank does not reach it.
            make: The function to call.
        Returns:
            Its result on this rank.
        """
        made: list[_Made] = []
        self._exchange.all_gather(what, lambda: made.append(make()))
        return made[0]

    def _publish(self, folder: Path, final: Path, files: Files, snapshot: Snapshot) -> None:
        """Make a checkpoint of the files that all ranks wrote: manifest, then rename."""
        assert self._workspace is not None
        self._describe(folder, files, snapshot)
        self._seen.check_formats([final])
        self._workspace.check()
        self._workspace.put_in_place(folder, final)
        durable.replace_link(self.directory / LATEST, final.name, folder.parent)

    def _describe(self, folder: Path, files: Files, snapshot: Snapshot) -> None:
        described = Manifest(
            step=snapshot.step,
            attempt=snapshot.origin.attempt,
            files=files,
            world_size=self._exchange.ranks.size,
            is_complete=snapshot.is_final,
            job=snapshot.origin.job,
            created=time.time(),
            versions={"forge": __version__, "torch": torch.__version__},
            **manifest.metrics_of(snapshot.origin.logged),
        )
        manifest.write_small(folder / manifest.NAME, described.to_bytes())
        durable.sync_directory(folder)

    def mark_complete(self, step: int, logged: Logged | None = None) -> None:
        """Record in the manifest of a checkpoint that its training is finished.

        One rename replaces the manifest; the other files stay as they are.

        Args:
            step: The checkpoint's step.
            logged: The metrics to store; None: those of its save.
        Raises:
            OSError: From the disk; the checkpoint has not changed.
            DamagedCheckpoint: If the checkpoint is missing or damaged.
            DirectoryInUse: If a newer attempt has taken over.
        """

        def mark() -> None:
            path = self.directory / f"step_{step}"
            metrics = {} if logged is None else manifest.metrics_of(logged)
            described = replace(manifest.read(path), is_complete=True, **metrics)
            assert self._workspace is not None
            with self._workspace.entered() as work:
                temporary = work / manifest.NAME
                temporary.unlink(missing_ok=True)
                manifest.write_small(temporary, described.to_bytes())
                self._workspace.check()
                os.replace(temporary, path / manifest.NAME)
                durable.sync_directory(path)
            self._seen.forget(path.name)

        self._exchange.broadcast("the end of the training", mark)

    def holds(self, step: int) -> bool:
        """Whether a good checkpoint of this step exists already.

        Args:
            step: Steps done.
        Returns:
            True if it exists, on all ranks alike.
        """
        path = self.directory / f"step_{step}"
        is_there = functools.partial(self._seen.has, path)
        return bool(self._exchange.broadcast("looking for a checkpoint", is_there))

    # -- removing ------------------------------------------------------------------------------

    def retain(self, first_bad_step: int | None = None) -> list[str]:
        """Remove the checkpoints that the policy does not keep; a thread deletes the files.

        The newest good checkpoint, the target of `latest`, checkpoints being read, and
        other files always stay. Failed removals are logged; the next call tries again.

        Args:
            first_bad_step: The first step of the current streak of bad steps, if there is one.
        Returns:
            The names that were removed.
        Raises:
            OSError: If the directory cannot be read.
            DirectoryInUse: If a newer attempt has taken over.
        """
        if self._workspace is None:
            return []
        self._workspace.check()
        remover = self._workspace.remover
        remover.retry()
        names = os.listdir(self.directory)
        found = step_dirs(self.directory)
        good = self._seen.all_good(found)
        kept = self._retention.kept(good, first_bad_step)
        # Left by a finished training that was later continued.
        finals = [self.directory / name for name in names if name.startswith(f"{FINAL}step_")]
        superseded = [one for one in finals if not found or one.name != FINAL + found[0].name]
        with contextlib.suppress(FileNotFoundError):
            kept.add(os.path.basename(os.path.realpath(self.directory / LATEST, strict=True)))
        removed: list[str] = []
        superfluous = [p for p in (*good, *superseded) if p.name not in kept]
        if superfluous:
            with self._workspace.entered() as work:
                removed = [p.name for p in superfluous if remover.take(p, work)]
        for name in removed:
            self._seen.forget(name)
        return removed

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints that a rollback has made obsolete.

        Args:
            step: The step that the rollback returned to; later checkpoints are removed.
        Raises:
            CheckpointError: If one could not be removed, so that a resume would load it.
        """
        if self._workspace is None:
            return
        try:
            obsolete = [one for one in step_dirs(self.directory) if (step_of(one) or 0) > step]
            self._seen.check_formats(obsolete)
            with self._workspace.entered() as work:
                durable.replace_link(self.directory / LATEST, f"step_{step}", work)
                for path in obsolete:
                    self._workspace.remover.discard(path, work)
                    self._seen.forget(path.name)
                durable.sync_directory(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"The rollback to step {step} has to remove the later checkpoints from"
                f" {self.directory}, but this failed: {error}. Move the checkpoints after step"
                f" {step} away, then start the job again: otherwise it resumes from one of these"
                " checkpoints."
            ) from error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the files of removed checkpoints are deleted.

        Args:
            timeout_s: Seconds to wait at most; None: no limit.
        """
        if self._workspace is not None:
            self._workspace.remover.wait(timeout_s)
