"""Decides when to save the state, saves it, records the save, and handles a failure.

One module, since saves of all causes share the thread, the record and the failures in a row.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from forge import messages
from forge.checkpoint.format.manifest import Origin
from forge.checkpoint.staging import Snapshot
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig, OnPendingSave
from forge.errors import CheckpointError, Exit, is_disk_full, unwritable
from forge.group.requests import SaveRequest, Watcher
from forge.jobdir.ledger_writer import Ledger
from forge.process import sections
from forge.process.progress import Phase
from forge.process.time_limit import RECENT_SAVES, Recent, first_save_s
from forge.training.metrics import Metrics
from forge.training.nan.nan_policy import NanPolicy

MAX_FAILURES = 5
"""Failed saves in a row after which the run ends: its progress could not be kept anyway."""

FINAL_TRIES = 3
"""How often the save at a stop is tried."""

ROOM_WAIT_S = 5.0
"""Longest wait of a retry, in seconds, for old checkpoints that are being deleted."""


class SaveCause(Enum):
    """Why a checkpoint is saved, as the ledger records it."""

    start = "start"
    """A state for a rollback to return to before the first periodic save."""
    periodic = "periodic"
    requested = "requested"
    """By `Run.save`, or by a signal whose action is `save`."""
    stop = "stop"
    held = "held"
    """Before functions of `run.every`, if there is no memory for a copy."""
    end = "end"
    """A loop has ended; a resumed job repeats the code after the loop from here."""
    finished = "finished"
    """The code after the last loop has changed the state."""


@dataclass
class _Save:
    """A save in progress."""

    cause: SaveCause
    stopped: float
    """Unix time at which training stopped for it."""
    began: float
    """When its snapshot began, by the monotonic clock: no save was in progress any more."""
    waited_s: float | None = None
    """Seconds for which training has waited; None: it still waits."""

    def end_pause(self) -> None:
        """Training continues, if it had not before."""
        if self.waited_s is None:
            self.waited_s = time.time() - self.stopped


class Saver(Watcher):
    """Saves in this thread or, with `checkpoint.async_save`, in the background.

    The `state` of its methods is `TrainState.capture`.
    """

    def __init__(
        self,
        store: Store,
        config: CheckpointConfig,
        ledger: Ledger,
        nan: NanPolicy,
        metrics: Metrics,
    ) -> None:
        self._every_s = config.every_s
        self._store = store
        self._config = config
        self._ledger = ledger
        self._nan = nan
        self._metrics = metrics
        self._job = ""
        """The id of `job.json`, once the attempt has begun."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failures = 0
        self._last_step: int | None = None
        self._num_bytes = 0
        """The size of the last snapshot."""
        self.considered: int | None = None
        """The step of the last save that was done, tried or skipped; None: none yet."""
        self._last_time = time.monotonic()
        self._first_by = math.inf
        """The latest time for the first save, by the monotonic clock."""
        self.costs = Recent(RECENT_SAVES)
        """Seconds that saves took, from the start of the snapshot to the commit."""
        self._evaluated: int | None = None
        """The step whose functions have run; its checkpoint on disk can be older than that."""

    def expect(self, num_bytes: int, within_s: float = math.inf) -> None:
        """Set what the first save depends on.

        Args:
            num_bytes: Bytes of the parameters.
            within_s: Seconds until the first save is due in any case.
        """
        self._first_by = time.monotonic() + within_s
        self.costs = Recent(RECENT_SAVES, first_save_s(num_bytes))

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed."""
        return self._failures > 0

    @property
    def cost_s(self) -> float:
        """Seconds that a save started now would take, including the wait for one in progress."""
        thread = self._thread
        is_waited_for = thread is not None and thread.is_alive()
        return self.costs.longest * (1 + is_waited_for)

    def begin(self, job: str, step: int | None) -> None:
        """The attempt of the job with this id begins; see `count_from`."""
        self._job = job
        self.count_from(step)

    def count_from(self, step: int | None) -> None:
        """Count intervals from `step`, which is saved; None: there is no checkpoint yet."""
        self._evaluated = None
        self.considered = self._last_step = step
        self._last_time = time.monotonic()

    def evaluated(self, step: int) -> None:
        """Functions of this boundary have run: a save that is due here includes their changes."""
        self._evaluated = step
        if self.considered == step:
            self.considered = step - 1

    def request(self, step: int) -> SaveRequest | None:
        """A save that is due by time.

        Raises:
            CheckpointError: If a save in the background has failed for good.
        """
        if self._failure is not None:
            self.check()
        if not self.is_overdue(step):
            return None
        return SaveRequest(step, is_periodic=True, rollbacks=self._nan.rollbacks)

    def is_overdue(self, step: int) -> bool:
        """Whether a save is due by time when `step` steps are done."""
        if step == self.considered or (self.considered is None and step == 0):
            return False  # the initial state can be built again
        now, every_s = time.monotonic(), self._every_s
        return now >= self._first_by or (every_s is not None and now - self._last_time >= every_s)

    @sections.in_section(Phase.save, "periodic")
    def save(self, step: int, state: Callable[[], Any], cause: SaveCause) -> None:
        """Do a periodic save; a failure is logged, and ends the run only after MAX_FAILURES.

        Raises:
            CheckpointError: After MAX_FAILURES failures in a row.
            DirectoryInUse: If a newer attempt has taken over the directory.
        """
        self._metrics.flush()
        if cause is SaveCause.periodic and self._is_skipped(step):
            return
        self._first_by = math.inf
        save = self._begin(step, cause, self.wait)
        is_newer = self._evaluated == step
        self.count_from(step)
        copy = self._config.async_save
        snapshot = self._snapshot(step, state, copy=copy, replaces=is_newer)
        if snapshot.is_independent:
            save.end_pause()  # from here on training continues
            self._thread = threading.Thread(
                target=self._commit_beside,
                args=(snapshot, save),
                name="forge-save",
                daemon=True,
            )
            self._thread.start()
            return
        try:
            self._commit(snapshot, save)
        except OSError as error:
            self._count_failure(step, error)

    def _begin(self, step: int, cause: SaveCause, wait: Callable[[], None]) -> _Save:
        """Stop training for a save, once the save in progress has ended.

        Args:
            step: Steps done.
            cause: Why it is saved.
            wait: `wait` or `settle`.
        """
        stopped = time.time()
        self._ledger.write("saving", step=step)  # an attempt without a `save` ended in this one
        wait()
        return _Save(cause, stopped, time.monotonic())

    def _snapshot(self, step: int, state: Callable[[], Any], **options: bool) -> Snapshot:
        """Take a snapshot; if that fails on one rank, it fails on all ranks."""
        try:
            return self._take(step, state, **options)
        except (Exception, Exit) as error:
            if self._store.is_alone:
                raise
            if isinstance(error, OSError):  # an OSError would be retried, as if a disk were full
                error = CheckpointError(f"The state cannot be saved: {error}")
            self._store.fail_save(error)

    def _take(self, step: int, state: Callable[[], Any], **options: bool) -> Snapshot:
        state_now = state()
        origin = Origin(self._ledger.attempt, self._job, self._metrics.latest())
        snapshot = self._store.snapshot(step, state_now, origin=origin, **options)
        self._num_bytes = snapshot.num_bytes
        return snapshot

    def _is_skipped(self, step: int) -> bool:
        """Whether to skip this save because another is in progress; logs a skip."""
        is_busy = self._thread is not None and self._thread.is_alive()
        is_skipping = self._config.on_pending_save is OnPendingSave.skip and self._store.is_alone
        if not is_busy or not is_skipping:  # with several ranks, only some of them would skip
            return False
        messages.warn(
            f"Skipped the save at step {step}: the save of step {self._last_step} is still being"
            " written (`resilience.checkpoint.on_pending_save=skip`)."
        )
        self._ledger.write("save_skipped", step=step, busy_with=self._last_step)
        self.considered = step
        self._last_time = time.monotonic()
        return True

    @sections.in_section(Phase.save, "final")
    def save_final(self, step: int, state: Callable[[], Any], cause: SaveCause) -> None:
        """Save at a stop or at the end; retried on failure.

        Raises:
            CheckpointError: If all tries failed.
        """
        save = self._begin(step, cause, self.settle)
        self.count_from(step)
        is_final, replaces = cause is SaveCause.finished, cause is not SaveCause.stop
        snapshot = self._snapshot(step, state, copy=False, is_final=is_final, replaces=replaces)
        self._commit_final(snapshot, save)

    @sections.in_section(Phase.save, "copy")
    def keep(self, step: int, state: Callable[[], Any]) -> Snapshot | None:
        """A copy of the state, for `save_kept`; None if there is no memory for it."""
        self._join()
        snapshot = self._take(step, state, copy=True)
        return snapshot if snapshot.is_independent else None

    @sections.in_section(Phase.save, "final")
    def save_kept(self, snapshot: Snapshot, cause: SaveCause) -> None:
        """Save the snapshot from `keep`; replaces an existing checkpoint of that step.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self._metrics.flush()
        save = self._begin(snapshot.step, cause, self.settle)
        self.count_from(snapshot.step)
        self._commit_final(snapshot, save)

    @sections.in_section(Phase.save, "final")
    def mark_finished(self, step: int, *, has_changed: bool) -> None:
        """Mark the checkpoint of the last loop's end as that of a finished training.

        Args:
            step: Steps done.
            has_changed: Whether the state has changed since, and is saved separately.
        Raises:
            CheckpointError: If it cannot be written.
        """
        logged = None if has_changed else self._metrics.latest()
        self._try_final(step, lambda: self._store.mark_complete(step, logged))
        self.tidy()

    @sections.in_section(Phase.save, "copy")
    def hold(
        self, step: int, state: Callable[[], Any], *, may_write: bool
    ) -> Callable[[], None] | None:
        """Keep the state of this boundary, to commit it if a stop comes before the next save.

        Args:
            step: Steps done.
            state: Returns the state.
            may_write: Whether to write the state to disk now if there is no memory for a copy;
                else it is not kept.
        Returns:
            A function that writes the state to disk, unless it is there already; None if the state
            is not kept.
        Raises:
            CheckpointError: If it cannot be written.
        """
        if not self._store.is_alone:
            self._join()  # a background save also communicates with the other ranks
        if self._store.holds(step) and self._evaluated != step:
            return lambda: None
        snapshot = self._take(step, state, copy=True)

        @sections.in_section(Phase.save, "held")
        def commit(cause: SaveCause = SaveCause.stop) -> None:
            self._commit_final(snapshot, self._begin(step, cause, self.settle))

        if not snapshot.is_independent:
            if not may_write:
                return None
            commit(SaveCause.held)
            return lambda: None
        return commit

    def settle(self) -> None:
        """Wait for the save in progress; a failure is only logged, because another save follows."""
        try:
            self.wait()
        except CheckpointError as error:
            messages.warn(str(error))  # the next save can succeed

    def _commit_final(self, snapshot: Snapshot, save: _Save) -> None:
        # A process cannot exit while a thread of it deletes a large file: after a stop, the
        # next attempt removes old checkpoints.
        self._try_final(snapshot.step, lambda: self._commit(snapshot, save, tidies=False))

    def _try_final(self, step: int, write: Callable[[], None]) -> None:
        for tries_left in range(FINAL_TRIES - 1, -1, -1):
            try:
                write()
                return
            except OSError as error:
                messages.warn(f"The save at step {step} failed: {error}")
                self._ledger.write("save_failed", step=step, error=str(error))
                if not tries_left:
                    raise unwritable(
                        f"The state at step {step} could not be saved to {self._store.directory}:"
                        f" {error}.{self._room(error)} The last good checkpoint is still on disk.",
                        error,
                    ) from error
                self._store.wait(ROOM_WAIT_S)  # deletions that are in progress free space

    @property
    def is_pending(self) -> bool:
        """Whether a save in the background can still commit."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait for the save in progress, and handle a failure."""
        self._join()
        self.check()

    def finish(self) -> None:
        """Wait for the save in progress; a failure can only be logged now."""
        self._join()
        if self._failure is not None:
            messages.warn(f"The last save failed: {self._failure}")

    @sections.in_section(Phase.save, "in the background")
    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Handle the failure of a background save that has ended."""
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            self._count_failure(self._last_step or 0, failure)
        elif failure is not None:
            raise failure

    def _commit_beside(self, snapshot: Snapshot, save: _Save) -> None:
        try:
            self._commit(snapshot, save)
        except BaseException as error:  # noqa: BLE001 - raised again by `check`
            self._failure = error

    def _commit(self, snapshot: Snapshot, save: _Save, *, tidies: bool = True) -> None:
        begin = time.monotonic()
        path = self._store.commit(snapshot, self._ledger.sync)
        if path is None:
            return
        self._failures = 0
        self.costs.add(time.monotonic() - save.began)
        self._record(snapshot, path, save, time.monotonic() - begin)
        if tidies:
            self.tidy()

    def _record(self, snapshot: Snapshot, path: Path, save: _Save, seconds: float) -> None:
        """Record a commit that took so many seconds; training waits no longer for it."""
        save.end_pause()
        waited_s = save.waited_s or 0.0
        self._ledger.write(
            "save",
            step=snapshot.step,
            reason=save.cause.name,
            path=path.name,
            bytes=snapshot.num_bytes,
            seconds=round(seconds, 4),
            began=round(save.stopped, 3),
            waited=round(waited_s, 4),
            summary=self._metrics.summary(),
        )

    def tidy(self) -> None:
        """Remove the checkpoints that the policy does not keep."""
        try:
            self._store.retain(self._nan.first_bad_step)
        except OSError as error:
            messages.warn(f"Old checkpoints could not be removed: {error}")

    def _count_failure(self, step: int, error: OSError) -> None:
        self._failures += 1
        self._ledger.write("save_failed", step=step, error=str(error))
        text = (
            f"The save at step {step} failed ({self._failures} of {MAX_FAILURES} in a row): {error}"
        )
        if self._failures >= MAX_FAILURES:
            what = "Make room" if is_disk_full(error) else f"Repair {self._store.directory}"
            raise unwritable(
                f"{text}. The run ends, because no further progress can be saved."
                f"{self._room(error)} {what}, then start the job again.",
                error,
            ) from error
        messages.warn(f"{text}.{self._room(error)} Training continues; the next save will retry.")

    def _room(self, error: OSError) -> str:
        """Says how much room a checkpoint needs and how much there is, if the disk is full."""
        if not is_disk_full(error):
            return ""
        free = shutil.disk_usage(self._store.directory).free
        return (
            f" A checkpoint has {self._num_bytes:,} bytes, and {self._store.directory} has"
            f" {free:,} bytes free (a quota can leave less)."
        )
