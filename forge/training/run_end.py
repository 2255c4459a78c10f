"""The end of a Run: changes by the code after the last loop are saved, too.

    a loop ends    its state is saved; after a break or an error a copy of it is kept
    the exit       if the state has changed since, it is saved again under a separate name;
                   then the checkpoint of the loop's end is marked as finished training

A job that was killed in between, or a finished job that is started again, resumes from the end of
the loop and repeats the code after it.
"""

from __future__ import annotations

import contextlib

from forge import messages
from forge.checkpoint.staging import Snapshot
from forge.group import requests
from forge.group.group import Exchange
from forge.group.requests import StopRequest
from forge.training.parts import Parts
from forge.training.saver import SaveCause

_ALL_S = 300.0
"""Largest delay between ranks, in seconds, at a call that all ranks have to make."""


class RunEnd:
    """Saves and marks the end of an attempt."""

    def __init__(self, parts: Parts) -> None:
        self._exchange = Exchange(parts.group, "the end")
        self._loops = parts.loops
        self._train_state = parts.train_state
        self._saver = parts.saver
        self._store = parts.directory.store
        self._handler = parts.handler
        self._shutdown = parts.shutdown
        self._stops = parts.stops
        self._kept: Snapshot | None = None
        """A copy of the state at the time when a break left the loop."""
        self._fingerprint = ""
        """Fingerprint of the state at the end of the last loop; empty: no loop has ended."""
        self._is_saved = False
        """Whether that state is in a checkpoint (unless its save has failed)."""

    def begin_loop(self) -> None:
        """A loop begins, so the end of the last loop was not the end of the Run."""
        self._kept, self._fingerprint, self._is_saved = None, "", False

    def end_loop(self) -> None:
        """The loop has ended, and its state was saved or loaded."""
        self._kept, self._fingerprint, self._is_saved = None, self._train_state.fingerprint(), True

    def leave_loop(self) -> None:
        """A break or an error (they look the same) left the loop: its end is not saved yet."""
        self.begin_loop()
        if self._shutdown.exit is not None:
            return
        with contextlib.suppress(Exception):  # the error can be that of a lost device
            self._kept = self._saver.keep(self._loops.step, self._train_state.capture)
            self._fingerprint = self._train_state.fingerprint()

    def save_now(self) -> None:
        """`run.save()` outside a loop: after a break, save the state that the loop has left.

        Raises:
            CheckpointError: If it cannot be written.
        """
        # Check first: if only one rank calls this, it would hang in the save.
        what = "run.save() outside a loop, which every rank has to call"
        if all(self._exchange.all_gather(what, lambda: self._kept is not None, within_s=_ALL_S)):
            self._save_kept(SaveCause.requested)
        else:
            self._saver.save(self._loops.step, self._train_state.capture, SaveCause.requested)

    def _save_kept(self, cause: SaveCause) -> None:
        assert self._kept is not None
        self._saver.save_kept(self._kept, cause)
        self._kept, self._is_saved = None, True

    def finish(self) -> StopRequest | None:
        """The block has ended without an error: save changes, and mark the training as finished.

        Returns:
            A stop that was requested since the last loop ended.
        Raises:
            CheckpointError: If the state cannot be written.
        """
        if not self._loops.is_complete:
            self._save()
        texts = self._exchange.all_gather("the exit of the `with` block", self._requested_stop)
        stops = [requests.from_text(text) for text in texts if text is not None]
        return next((one for one in stops if isinstance(one, StopRequest)), None)

    def _requested_stop(self) -> str | None:
        is_requested = self._handler.should_shutdown()
        return requests.to_text(self._stops.stop_request()) if is_requested else None

    def _save(self) -> None:
        step, saver = self._loops.step, self._saver
        saver.settle()
        answers = self._exchange.all_gather("the end of the training", self._answer)
        changed, kept, saved = (list(one) for one in zip(*answers, strict=True))
        has_changed = any(changed)
        if all(kept):
            self._save_kept(SaveCause.end)
        elif not (all(saved) and self._store.holds(step)):
            if has_changed:
                messages.warn(
                    "The state at the end of the last loop was not saved (for lack of memory, or"
                    " because the save failed), and the code after the loop has changed it. If this"
                    " job is started again, that code runs again, on the changed state. To avoid"
                    " that, end the loop by `run.finish()` instead of `break`: it saves before that"
                    " code runs."
                )
            saver.save_final(step, self._train_state.capture, SaveCause.end)
            has_changed = False
        if has_changed:
            saver.save_final(step, self._train_state.capture, SaveCause.finished)
        saver.mark_finished(step, has_changed=has_changed)

    def _answer(self) -> tuple[bool, bool, bool]:
        """Whether the state has changed since the loop ended, is kept as a copy, and is saved."""
        before = self._fingerprint
        has_changed = bool(before) and self._train_state.fingerprint() != before
        return has_changed, self._kept is not None, self._is_saved and not self._saver.has_failed
