"""When state is saved, and what happens when saving fails."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

from forge import messages
from forge.checkpoint import Store
from forge.checkpoint.save.copies import Snapshot
from forge.checkpoint.save.together import START
from forge.config.schema import CheckpointConfig, OnPendingSave
from forge.errors import CheckpointError, Exit, unwritable
from forge.jobdir.ledger import Ledger
from forge.process import sections
from forge.process.progress import Section
from forge.process.time_limit import RECENT_SAVES, Recent, first_save_s
from forge.training.loop.held import Held
from forge.training.nan.nan_policy import NanPolicy

MAX_FAILURES = 5
"""Failed saves in a row after which the run ends: it would only train what it cannot keep."""

FINAL_TRIES = 3
"""Tries of the save at a stop."""

ROOM_WAIT_S = 5.0
"""Seconds that another try waits at most for old checkpoints that are being deleted."""


class SaveCause(Enum):
    """Why something is saved, as the ledger has it."""

    start = "start"
    """What a rollback before the first periodic save goes back to."""
    periodic = "periodic"
    requested = "requested"
    """By `Run.save`, or by a signal whose action is `save`."""
    stop = "stop"
    held = "held"
    """Before functions of `run.every`, where there is no memory for a copy."""
    end = "end"
    """A loop has ended: what follows it is repeated from there."""
    finished = "finished"
    """What followed the last loop has changed the state."""


class Saver:
    """Saves in this thread or, with `checkpoint.async_save`, beside training."""

    def __init__(
        self,
        store: Store,
        config: CheckpointConfig,
        ledger: Ledger,
        nan: NanPolicy,
        *,
        is_alone: bool = True,
    ) -> None:
        self._store = store
        self._is_alone = is_alone
        self._config = config
        self._ledger = ledger
        self._nan = nan
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failures = 0
        self._last_step: int | None = None
        self.considered: int | None = None
        """Where a save was made, tried or left out last; None: nowhere yet."""
        self._last_time = time.monotonic()
        self._first_by = math.inf
        """When the first save is due at the latest, by the monotonic clock."""
        self.costs = Recent(RECENT_SAVES)
        """Seconds that saves took, from the start of the snapshot to the commit."""
        store.before_save = ledger.sync
        self._evaluated: int | None = None
        """The boundary whose functions have run; its checkpoint on disk may be of before them."""

    def expect(self, num_bytes: int, within_s: float = math.inf) -> None:
        """Before the first save: so many bytes of parameters, within so many seconds."""
        self._first_by = time.monotonic() + within_s
        self.costs = Recent(RECENT_SAVES, first_save_s(num_bytes))

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed."""
        return self._failures > 0

    @property
    def cost_s(self) -> float:
        """What a save takes that would be wanted now; it would wait for one that is under way."""
        thread = self._thread
        is_waited_for = thread is not None and thread.is_alive()
        return self.costs.longest * (1 + is_waited_for)

    def begin(self, step: int | None) -> None:
        """Count intervals from `step`, which is saved; None: nothing is saved yet."""
        self._evaluated = None
        self.considered = self._last_step = step
        self._last_time = time.monotonic()

    def evaluated(self, step: int) -> None:
        """Functions of this boundary have run: a save that is due here is to hold what they did."""
        self._evaluated = step
        if self.considered == step:
            self.considered = step - 1

    def is_overdue(self, step: int) -> bool:
        """Whether the clock asks for a save once so many steps are done."""
        if step == self.considered or (self.considered is None and step == 0):
            return False  # what nothing was done for can be built again
        now, every_s = time.monotonic(), self._config.every_s
        return now >= self._first_by or (every_s is not None and now - self._last_time >= every_s)

    @sections.in_section(Section.save, "periodic")
    def save(self, step: int, state: Callable[[], Any], cause: SaveCause) -> None:
        """A periodic save; a failure is logged and counted, and ends the run only when repeated.

        Raises:
            CheckpointError: After MAX_FAILURES failures in a row.
            DirectoryInUse: Where a newer attempt has taken over.
        """
        if cause is SaveCause.periodic and self._is_skipped(step):
            return
        self._first_by = math.inf
        self.wait()
        is_newer = self._evaluated == step
        self.begin(step)
        began = time.monotonic()
        snapshot = self._snapshot(step, state, is_complete=False, copy=self._config.async_save)
        snapshot.replaces = is_newer
        if snapshot.is_independent:
            self._thread = threading.Thread(
                target=self._commit_beside,
                args=(snapshot, cause, began),
                name="forge-save",
                daemon=True,
            )
            self._thread.start()
            return
        try:
            self._commit(snapshot, cause, began)
        except OSError as error:
            self._count_failure(step, error)

    def _snapshot(
        self, step: int, state: Callable[[], Any], *, is_complete: bool, copy: bool
    ) -> Snapshot:
        """A state that cannot be saved on one rank cannot be saved."""
        try:
            return self._store.snapshot(step, state(), is_complete=is_complete, copy=copy)
        except (Exception, Exit) as error:
            if self._is_alone:
                raise
            failure = error
            if isinstance(error, OSError):  # no disk that comes back
                failure = CheckpointError(f"The state cannot be saved: {error}")

        def raising() -> NoReturn:
            raise failure

        return self._store.on_all(START, raising)

    def _is_skipped(self, step: int) -> bool:
        """Whether one that is under way takes the place of this one, and tell so."""
        is_busy = self._thread is not None and self._thread.is_alive()
        is_skipping = self._config.on_pending_save is OnPendingSave.skip and self._is_alone
        if not is_busy or not is_skipping:  # of many ranks some would, and some would not
            return False
        messages.warn(
            f"The save at step {step} is skipped: the one of step {self._last_step} is still being"
            " written (`resilience.checkpoint.on_pending_save=skip`)."
        )
        self._ledger.write("save_skipped", step=step, busy_with=self._last_step)
        self.considered = step
        self._last_time = time.monotonic()
        return True

    @sections.in_section(Section.save, "final")
    def save_final(self, step: int, state: Callable[[], Any], cause: SaveCause) -> None:
        """The save at a stop or at the end; tried more than once.

        Raises:
            CheckpointError: Where it could not be written.
        """
        self.settle()
        self.begin(step)
        began = time.monotonic()
        is_final = cause is SaveCause.finished
        snapshot = self._snapshot(step, state, is_complete=is_final, copy=False)
        snapshot.is_final, snapshot.replaces = is_final, cause is not SaveCause.stop
        self._commit_final(snapshot, cause, began)

    @sections.in_section(Section.save, "copy")
    def keep(self, step: int, state: Callable[[], Any]) -> Snapshot | None:
        """A copy of the state, for `save_kept`; None if there is no memory for it."""
        self._join()
        snapshot = self._store.snapshot(step, state(), is_complete=False, copy=True)
        return snapshot if snapshot.is_independent else None

    @sections.in_section(Section.save, "final")
    def save_kept(self, snapshot: Snapshot, cause: SaveCause) -> None:
        """Save what `keep` gave, in the place of what is saved of that step.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self.settle()
        self.begin(snapshot.step)
        self._commit_final(snapshot, cause, time.monotonic())

    @sections.in_section(Section.save, "final")
    def mark_finished(self, step: int, *, has_changed: bool) -> None:
        """Mark the checkpoint of the end of the last loop as that of a finished training.

        Args:
            step: Steps done.
            has_changed: Whether the state has changed since, and is saved by itself.
        Raises:
            CheckpointError: If it cannot be written.
        """
        mark = self._store.mark_complete
        self._try_final(step, lambda: mark(step, with_metrics=not has_changed))
        self.tidy()

    @sections.in_section(Section.save, "copy")
    def hold(self, step: int, state: Callable[[], Any], *, may_write: bool) -> Held | None:
        """Keep the state of this boundary, to be committed if a stop comes before its own save.

        Args:
            step: Of that many steps done.
            state: Gives the state.
            may_write: Whether it is written to disk here and now, where there is no memory for a
                copy; else it is not kept.
        Raises:
            CheckpointError: Where it could not be written.
        """
        if not self._is_alone:
            self._join()  # a save in its thread exchanges values with the other ranks, too
        if self._store.holds(step, is_complete=False) and self._evaluated != step:
            return Held(None)
        snapshot = self._store.snapshot(step, state(), is_complete=False, copy=True)

        @sections.in_section(Section.save, "held")
        def commit(cause: SaveCause = SaveCause.stop) -> None:
            self.settle()
            self._commit_final(snapshot, cause, time.monotonic())

        if not snapshot.is_independent:
            if not may_write:
                return None
            commit(SaveCause.held)
            return Held(None)
        return Held(commit)

    def settle(self) -> None:
        """Wait for the save that is under way; a failure is logged, since another save follows."""
        try:
            self.wait()
        except CheckpointError as error:
            messages.warn(str(error))  # this save may still succeed

    def _commit_final(self, snapshot: Snapshot, cause: SaveCause, began: float) -> None:
        # A process whose thread is deleting a large file is not gone before that is done: after a
        # stop the next attempt removes what is too much.
        commit = functools.partial(self._commit, snapshot, cause, began, tidies=False)
        self._try_final(snapshot.step, commit)

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
                        f" {error}. The last good checkpoint is in place.",
                        error,
                    ) from error
                self._store.wait(ROOM_WAIT_S)  # what is being deleted makes room

    @property
    def is_pending(self) -> bool:
        """Whether a save in the background can still commit."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait for the save that is under way, and take its outcome in."""
        self._join()
        self.check()

    def finish(self) -> None:
        """Wait for the save that is under way; a failure can only be logged by now."""
        self._join()
        if self._failure is not None:
            messages.warn(f"The last save failed: {self._failure}")

    @sections.in_section(Section.save, "in the background")
    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Take in the outcome of a save that has ended beside training."""
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            self._count_failure(self._last_step or 0, failure)
        elif failure is not None:
            raise failure

    def _commit_beside(self, snapshot: Snapshot, cause: SaveCause, began: float) -> None:
        try:
            self._commit(snapshot, cause, began)
        except BaseException as error:  # noqa: BLE001 - raised again by `check`
            self._failure = error

    def _commit(
        self, snapshot: Snapshot, cause: SaveCause, began: float, *, tidies: bool = True
    ) -> None:
        begin = time.monotonic()
        path = self._store.commit(snapshot)
        if path is None:
            return
        self._failures = 0
        self.costs.add(time.monotonic() - began)
        self._ledger.write(
            "save",
            step=snapshot.step,
            reason=cause.name,
            path=path.name,
            bytes=snapshot.num_bytes,
            seconds=round(time.monotonic() - begin, 4),
        )
        if tidies:
            self.tidy()

    def tidy(self) -> None:
        """Remove the checkpoints that the policy does not keep."""
        try:
            self._store.retain(self._nan.first_bad_step)
        except OSError as error:
            messages.warn(f"Old checkpoints could not be removed: {error}")

    def _count_failure(self, step: int, error: OSError) -> None:
        self._failures += 1
        self._ledger.write("save_failed", step=step, error=str(error))
        text = f"The save at step {step} failed ({self._failures} of {MAX_FAILURES}): {error}"
        if self._failures >= MAX_FAILURES:
            raise unwritable(
                f"{text}. The run ends here, because nothing it learns from now on could be kept."
                f" Make room or repair {self._store.directory}, then start it again.",
                error,
            ) from error
        messages.warn(f"{text}. Training continues; the next save will try again.")
