"""The end of a Run is the exit of its `with` block: what follows the last loop belongs to it.

    a loop ends    its state is saved; a copy of it is kept if a break or an error has left the loop
    the exit       the state is saved once more if it has changed since, under a name of its own;
                   then the checkpoint of the loop's end is marked as that of a finished training

Whoever resumes begins with the loop's end, and repeats what follows it from there: a job that was
killed in between, and a finished job that is started again.
"""

from __future__ import annotations

import contextlib

from forge import messages
from forge.checkpoint.save.copies import Snapshot
from forge.checkpoint.save.together import Exchange
from forge.group import facts
from forge.group.facts import StopAsked
from forge.group.group import Group
from forge.shutdown.signal_handler import ShutdownHandler
from forge.training.contents import Contents
from forge.training.leaving import Leaving
from forge.training.loop.loops import Loops
from forge.training.saver import SaveCause
from forge.training.start.run_directory import RunDirectory

_ALL_S = 300.0
"""Seconds that the ranks may come after each other to a call that all of them have to make."""


class RunEnd:
    """Saves and marks the end of one attempt.

    Args:
        group: The ranks.
        loops: Where the run is.
        contents: What is saved.
        directory: Where it is saved.
        handler: Of the signals.
        leaving: How a stop leaves.
    """

    def __init__(
        self,
        group: Group,
        loops: Loops,
        contents: Contents,
        directory: RunDirectory,
        handler: ShutdownHandler,
        leaving: Leaving,
    ) -> None:
        self._exchange = Exchange(group, "the end")
        self._loops = loops
        self._contents = contents
        self._saver = directory.saver
        self._store = directory.store
        self._handler = handler
        self._leaving = leaving
        self._kept: Snapshot | None = None
        """A copy of the state as a break has left the loop."""
        self._fingerprint = ""
        """Of the state as the last loop ended; empty: no loop has ended."""
        self._is_saved = False
        """Whether that state is in a checkpoint, unless its save has failed."""

    def begin_loop(self) -> None:
        """A loop begins, so the end of the last one was not the end of the Run."""
        self._kept, self._fingerprint, self._is_saved = None, "", False

    def end_loop(self) -> None:
        """The loop has ended, and this state was saved, or was loaded."""
        self._kept, self._fingerprint, self._is_saved = None, self._contents.fingerprint(), True

    def leave_loop(self) -> None:
        """A break has left the loop, or an error, which looks the same: nothing is saved so far."""
        self.begin_loop()
        if self._leaving.exit is not None:
            return
        with contextlib.suppress(Exception):  # the error may be that of a device that is lost
            self._kept = self._saver.keep(self._loops.step, self._contents.capture)
            self._fingerprint = self._contents.fingerprint()

    def save_anew(self) -> None:
        """What is saved of this step is of an earlier boundary: the end of the loop is not."""
        self._saver.evaluated(self._loops.step)

    def save_now(self) -> None:
        """`run.save()` outside a loop: after a break, save the state that the loop has left.

        Raises:
            CheckpointError: If it cannot be written.
        """
        # First: a rank that alone calls it would wait in a save, perhaps together with another one.
        what = "run.save() outside a loop, which every rank has to call"
        if all(self._exchange.give(what, lambda: self._kept is not None, within_s=_ALL_S)):
            self._save_kept(SaveCause.requested)
        else:
            self._saver.save(self._loops.step, self._contents.capture, SaveCause.requested)

    def _save_kept(self, cause: SaveCause) -> None:
        assert self._kept is not None
        self._saver.save_kept(self._kept, cause)
        self._kept, self._is_saved = None, True

    def finish(self) -> StopAsked | None:
        """The block has ended without an error: save what is not saved, and mark it.

        Returns:
            A stop that was requested since the last loop ended.
        Raises:
            CheckpointError: If it cannot be written.
        """
        if not self._loops.is_complete:
            self._save()
        texts = self._exchange.give("the exit of the `with` block", self._requested_stop)
        stops = [facts.from_text(text) for text in texts if text is not None]
        return next((one for one in stops if isinstance(one, StopAsked)), None)

    def _requested_stop(self) -> str | None:
        is_requested = self._handler.should_shutdown()
        return facts.to_text(self._leaving.asked()) if is_requested else None

    def _save(self) -> None:
        step, saver = self._loops.step, self._saver
        saver.settle()
        answers = self._exchange.give("the end of the training", self._answer)
        changed, kept, saved = (list(one) for one in zip(*answers, strict=True))
        has_changed = any(changed)
        if all(kept):
            self._save_kept(SaveCause.end)
        elif not (all(saved) and self._store.holds(step, is_complete=False)):
            if has_changed:
                messages.warn(
                    "The state at the end of the last loop is in no checkpoint, and what followed"
                    " the loop has changed it: if this job is started again, that work is done"
                    " once more, on the changed state."
                )
            saver.save_final(step, self._contents.capture, SaveCause.end)
            has_changed = False
        if has_changed:
            saver.save_final(step, self._contents.capture, SaveCause.finished)
        saver.mark_finished(step, has_changed=has_changed)

    def _answer(self) -> tuple[bool, bool, bool]:
        """Whether the state has changed since the loop ended, and that is kept, or saved."""
        before = self._fingerprint
        has_changed = bool(before) and self._contents.fingerprint() != before
        return has_changed, self._kept is not None, self._is_saved and not self._saver.has_failed
