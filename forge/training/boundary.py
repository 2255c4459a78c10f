"""A step boundary: collect the requests of all ranks, decide, then act.

One module, since a stop, a save, a rollback and the end of a pass act on the same state.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

from forge import messages
from forge.config.schema import NanAction
from forge.data.position import Position
from forge.errors import ForgeError
from forge.group.requests import FailureReport, FinishRequest, Request, SaveRequest, StopRequest
from forge.process import sections
from forge.process.progress import Phase
from forge.training import misuse
from forge.training.decide import (
    Decision,
    Finish,
    Go,
    Halt,
    LocalInputs,
    RollBack,
    Save,
    Stop,
    decide,
)
from forge.training.loop.loop_state import EpochPhase
from forge.training.parts import Parts
from forge.training.run_end import RunEnd
from forge.training.saver import SaveCause
from forge.training.shutdown import ENDS
from forge.training.start import preflight

if TYPE_CHECKING:
    from forge.training.loop.loop_lengths import LoopLengths
    from forge.training.loop.snapshot_holder import PendingSnapshot, SnapshotHolder


class Boundary:
    """Stops, saves, rolls back, evaluates or continues, between two steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._policy = parts.policy
        self._loops = parts.loops
        self._train_state = parts.train_state
        self._directory = parts.directory
        self._saver = parts.saver
        self._nan = parts.nan
        self._evaluations = parts.evaluations
        self._handler = parts.handler
        self._stops = parts.stops
        self._shutdown = parts.shutdown
        self._watchers = parts.watchers
        self._group = parts.group
        self.is_alone = parts.group.size == 1
        self._exchange = parts.exchange
        self._visits = 0  # boundaries reached so far
        self._run_end = RunEnd(parts)
        self.lengths: LoopLengths | None = None
        """Keeps the loops of several ranks equally long."""
        if not self.is_alone:
            from forge.training.loop.loop_lengths import LoopLengths  # one rank needs none

            self.lengths = LoopLengths(parts)
        self._holder: SnapshotHolder | None = None
        self._after_s = math.inf  # seconds that the code after a pass took last time
        self._after_began: float | None = None
        self._holding, self._after = contextlib.ExitStack(), contextlib.ExitStack()

    # -- the begin and the end of a loop -------------------------------------------------------

    def begin_loop(self) -> None:
        """Begin a loop; with the action rollback, save a first state to roll back to."""
        self._run_end.begin_loop()
        if self._loops.step == 0 and self._policy.nan.action is NanAction.rollback:
            self._save_as(SaveCause.start)

    def pass_over(self, n: float = 0) -> None:
        """Skip a loop that had ended at the save; see `LoopProgress.pass_over`."""
        self._loops.pass_over(n)
        self._tell_loop_end()
        if self._loops.is_resumed and not self._loops.is_complete:
            self._run_end.end_loop()

    def end_loop(self) -> None:
        """A loop has ended: code after it, perhaps an evaluation, belongs to its last boundary."""
        self._tell_loop_end()
        self._loops.end_loop()

    def leave_loop(self) -> None:
        """A loop is left by a break, or by an error."""
        self._loops.break_off()
        self.note_left()
        self._tell_loop_end()
        self._run_end.leave_loop()
        self._loops.end_loop()

    def break_off(self, because: str) -> None:
        """Save the end of a loop of which only its owner, on all ranks, knows that it ends here."""
        self.note_left()
        self.check_left()
        self._loops.break_off(because)
        self.save_anew()
        self.pass_through(None, self._loops.step, has_ended=False)
        self.end_loop()

    def save_anew(self) -> None:
        """The checkpoint of this step is of an earlier boundary, so the loop's end is not saved."""
        self._saver.evaluated(self._loops.step)

    def _tell_loop_end(self) -> None:
        for tell in self._watchers.on_loop_end:
            tell(self._loops.step)

    def note_left(self) -> None:
        """This rank leaves its loop: by a break or an error, which look the same, or `end_loop`."""
        if self.lengths is not None:
            self.lengths.note_left()

    def check_left(self) -> None:
        """Exit if this rank has left its loop alone."""
        if self.lengths is not None:
            with self._shutdown.giving_up():
                self.lengths.check_left()

    def finish_run(self) -> StopRequest | None:
        """The last loop has ended, and the code after it; see `RunEnd.finish`."""
        self.check_left()
        with preflight.exits():
            return self._run_end.finish()

    # -- deciding ------------------------------------------------------------------------------

    def pass_through(
        self, position: Position | None, n: float, *, has_ended: bool | None = None
    ) -> bool:
        """Decide and act until the decision is to train a step or to end the loop.

        Args:
            position: The loop's position in its data.
            n: Steps that the loop is to do.
            has_ended: Whether the loop is already known to end here; None: depends on `n`.
        Returns:
            Whether the loop ends.
        """
        self._visits += 1
        self._loops.forget_loaded()
        for tell in self._watchers.on_boundary:
            tell(self._loops.step)
        if has_ended is None:
            has_ended = self._loops.step >= n
        while True:
            decision = self._decide(n)
            match decision:
                case Go():
                    pass
                case Halt():
                    self._shutdown.halt(decision)
                case Stop():
                    self._shutdown.log_wait()
                    self._stop(decision.request)
                case RollBack():
                    self._roll_back(position, decision.first_bad)
                    has_ended = self._loops.step >= n
                    continue
                case Finish(request=FinishRequest(text=text)):
                    self._finish_loop(text)
            is_end = isinstance(decision, Finish)
            if self._loops.due is None or (is_end and not has_ended):
                is_rest = self._loops.due == []
                step, stride = self._loops.step, self._loops.stride
                self._loops.expect(
                    self._evaluations.due(step, stride, is_end=is_end, is_rest=is_rest)
                )
                has_ended = is_end
            if isinstance(decision, Finish) and decision.stop is not None:
                self._shutdown.log_wait()
                self._stop(decision.stop)
            if self._loops.due:
                self._evaluate(self._loops.due)
                continue
            match decision:
                case Go():
                    # Several ranks stop at a later boundary, on which all of them agree.
                    if not self._propose(self._watchers.before_step) or not self.is_alone:
                        break
                case (Save() as save) | Finish(save=Save() as save):
                    self._save(save)
                case Finish() if self._saver.considered != self._loops.step:
                    self._save_as(SaveCause.end)
                case Finish():
                    self._run_end.end_loop()
                    return True
        for begin in self._watchers.on_step:
            begin(self._loops.step)
        return False

    def _decide(self, n: float) -> Decision:
        """Propose the requests of this rank, and decide from those of all ranks."""
        self._propose(self._watchers.request)
        known = LocalInputs(
            loop=self._loops.number,
            n=None if math.isinf(n) else int(n),
            every_steps=self._policy.checkpoint.every_steps,
            saved=self._saver.considered,
            nan=self._nan.wants,
            rollbacks=self._nan.rollbacks,
            stride=self._loops.stride,
        )
        try:
            agreed = self._group.agreed(self._visits)
        except ENDS as error:
            self._shutdown.give_up(error)
        return decide(agreed, self._loops.step, known)

    def _propose(self, asks: Iterable[Callable[[int], Request | None]]) -> bool:
        """Propose what watchers request; returns whether they request something."""
        has_requests = False
        for ask in asks:
            try:
                request = ask(self._loops.step)
            except ENDS as error:
                request = _failure(error)
            if request is not None:
                self._group.propose(request)
                has_requests = True
        return has_requests

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """If the state cannot be saved, propose to end the job."""
        try:
            yield
        except ENDS as error:
            self._group.propose(_failure(error))

    # -- acting --------------------------------------------------------------------------------

    def _roll_back(self, position: Position | None, first_bad: int) -> None:
        """Roll back on all ranks or on none: if it fails on one rank, the job ends."""
        from forge.training.rollback import Rollback  # few trainings need it

        rollback = Rollback(self._parts)
        try:
            self._exchange.all_gather("a rollback", lambda: rollback.do(position, first_bad))
            self._loops.forget_loaded()
        except ENDS as error:
            if not self.is_alone:  # a proposal counts at a later boundary, and there is none
                self._shutdown.give_up(error)
            self._group.propose(_failure(error))

    def finish(self, text: str) -> None:
        """See `Run.finish`."""
        loops, is_in_function = self._loops, self._evaluations.is_entered
        if not (loops.is_in_step or is_in_function):
            raise ForgeError(misuse.FINISH_OUTSIDE_A_LOOP)
        request = FinishRequest(loops.number, loops.next_boundary, text, self._nan.rollbacks)
        if self.lengths is None:
            self._group.propose(request)
        else:
            self.lengths.finish(request, is_in_function=is_in_function)

    def _share_finish(self, unless: Callable[[], object] = bool) -> None:
        if self.lengths is not None:
            self.lengths.share_finish(unless)

    def _finish_loop(self, text: str) -> None:
        """End the loop for good, as `break` does, and record why; a later start finds it ended."""
        self._loops.break_off(text)
        self._directory.ledger.progress(self._loops.step, self._loops.step)

    def _begin_evaluation(self) -> None:
        for tell in self._watchers.on_evaluation:
            tell(self._loops.step)

    @property
    def _snapshots(self) -> SnapshotHolder:
        """Holds boundaries; made for the first function of `run.every`, or the first epoch."""
        if self._holder is None:
            from forge.training.loop.snapshot_holder import SnapshotHolder  # others need none

            self._holder = SnapshotHolder(self._parts)
        return self._holder

    @property
    def _held(self) -> PendingSnapshot | None:
        return None if self._holder is None else self._holder.held

    def _evaluate(self, due: list[str]) -> None:
        """Run functions of `run.every`; metrics that they log belong to the last step done."""
        with sections.current().inside(Phase.evaluation, ", ".join(due)):
            self._begin_evaluation()
            snapshots, last_s = self._snapshots, self._evaluations.last_s(due)
            if not self.is_alone:
                snapshots.hold_together(last_s, self._visits)
            elif snapshots.is_worth(last_s):
                with self._failing():
                    snapshots.hold()
                if snapshots.held is None:
                    return
            try:
                with snapshots.watched():
                    self._evaluations.run(due, self._loops.step, before_each=self.check_stop)
                    self._shutdown.raise_again()
            except Exception as error:
                snapshots.stop_by(error, self._handler.explains)
                raise
            if snapshots.held is None:
                self._stops.limit.end_interval()  # a stop had to wait for the functions
            self._share_finish(self._group.held_stop)
            snapshots.let_go()
            self._loops.expect([])
            self._saver.evaluated(self._loops.step)

    def _save(self, save: Save) -> None:
        self._save_as(SaveCause.periodic if save.is_periodic else SaveCause.requested)

    def _save_as(self, cause: SaveCause) -> None:
        with self._failing():
            self._saver.save(self._loops.step, self._train_state.capture, cause)

    def _stop(self, request: StopRequest) -> NoReturn:
        held, final = self._held, self._saver.save_final
        save = lambda: final(self._loops.step, self._train_state.capture, SaveCause.stop)  # noqa: E731
        self._shutdown.stop(request, held.commit if held is not None else save)

    # -- the pass of an epoch ------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The code before the pass has run: save a state after it for a rollback to return to."""
        if self._policy.nan.action is NanAction.rollback:
            self._saver.evaluated(self._loops.step)
            self._save_as(SaveCause.start)

    def put_back(self) -> None:
        """Reload the checkpoint, so that code that ran again before the pass takes effect once."""
        with preflight.exits():
            self._train_state.reload()

    def end_pass(self, epoch: int, *, is_first: bool, may_stop: bool, is_left: bool) -> None:
        """Run the functions that are due after this pass, and hold the state until `let_go`.

        Args:
            epoch: Passes done.
            is_first: Whether the pass ended just now; else its end was loaded.
            may_stop: Whether the end of the pass can be saved; else a stop waits.
            is_left: Whether the pass ended by a break or an error.
        """
        loops = self._loops
        if is_first:
            assert loops.epochs is not None
            is_new = loops.due is None  # after a break: functions due at this step have not run
            loops.expect(self._evaluations.due_after_pass(epoch, loops.step, is_new=is_new))
            loops.epochs.phase = EpochPhase.after
        if loops.due and is_left and self.lengths is not None:
            self.lengths.check_left()  # before the functions, which can use collectives
        if loops.due and not may_stop:
            self._begin_evaluation()
            self._evaluations.run(loops.due, loops.step)
            self._share_finish()
            loops.expect([])
        while loops.due:
            match self._decide(math.inf):
                case Halt() as halt:
                    self._shutdown.halt(halt)
                case Stop(request=request) | Finish(stop=StopRequest() as request):
                    self._stop(request)
            self._evaluate(loops.due)
        self._begin_evaluation()
        if self.is_alone and may_stop and self._snapshots.is_worth(self._after_s):
            with self._failing():
                loops.fixed.check()  # the last step, left by a break, can have changed them
                self._snapshots.hold()
        self._after.enter_context(sections.current().inside(Phase.evaluation, "after a pass"))
        self._holding.enter_context(self._evaluations.after_pass())
        self._holding.enter_context(self._snapshots.watched())
        self._after_began = time.monotonic()

    def let_go(self, *, is_left: bool = False) -> None:
        """The code after a pass has run: release the state that was held.

        Args:
            is_left: Whether the loop over epochs ended too, possibly by an error that the other
                ranks do not know of: do not wait for them.
        """
        if self._after_began is None:
            return
        self._after_s, self._after_began = time.monotonic() - self._after_began, None
        with self._after:
            if self._held is not None:
                self._stops.limit.begin_interval()
            self.forget_held()
            self._shutdown.raise_again()
            if not is_left:
                self._share_finish()

    def forget_held(self) -> None:
        """Discard the held state: it must not be saved any more."""
        self._holding.close()
        if self._holder is not None:
            self._holder.discard()

    # -- called by the script ------------------------------------------------------------------

    def save(self) -> None:
        """See `Run.save`."""
        loops, step = self._loops, self._loops.next_boundary
        if loops.is_in_step or self._evaluations.is_running or loops.is_in_epochs:
            self._group.propose(SaveRequest(step, rollbacks=self._nan.rollbacks))
        else:
            self.check_left()
            self._save_now()

    def _save_now(self) -> None:
        with self._loops.not_between(), preflight.exits():
            self._run_end.save_now()

    def checkpoint(self) -> None:
        """Save if possible where the main thread was interrupted, and log the last checkpoint."""
        if self._held is not None:
            self._held.commit()
        elif self._loops.is_between:
            self._save_now()
            self._saver.wait()
        directory = self._directory.checkpoint_dir
        messages.say(f"Checkpoints in {directory}: {self._directory.in_place()}")

    def check_stop(self) -> None:
        """See `Run.check_stop`."""
        sections.current().advance(Phase.evaluation)
        self._shutdown.raise_again()
        if self._holder is not None:
            self._holder.stop_if_due()


def _failure(error: ForgeError) -> FailureReport:
    return FailureReport(int(error.exit_code), str(error))
