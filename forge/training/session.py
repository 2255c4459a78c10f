"""The life of an enabled `forge.Run`, from entering to leaving: its step boundaries.

One module, since whatever happens at a boundary reads and changes the same few facts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NoReturn

from forge import messages
from forge.checkpoint import Checkpoint
from forge.config.schema import NanAction, Policy, Resume
from forge.data.position import Position
from forge.errors import (
    CheckpointError,
    ConfigError,
    DirectoryInUse,
    Exit,
    ExitCode,
    ForgeError,
    Reason,
)
from forge.group.facts import Failed, FinishAsked, SaveAsked, StopAsked
from forge.group.group import Group, Solo
from forge.jobdir import job_dir, spawned
from forge.jobdir.job_files import SAVE_WITHIN, forge_dir
from forge.process.time_limit import TimeLimit
from forge.shutdown import stopping
from forge.state import rng
from forge.state.built import Built
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState
from forge.training import preflight, strikes
from forge.training.decide import Decision, Finish, Go, Halt, Known, RollBack, Save, Stop, decide
from forge.training.evaluations import Evaluations
from forge.training.held import Held
from forge.training.loops import Loops
from forge.training.nan_policy import NanPolicy, RateScale
from forge.training.owner import Owner
from forge.training.run_directory import RunDirectory
from forge.training.saver import SaveCause
from forge.training.update import Updater

_ACTION: Any = NanAction

_ENDS = (CheckpointError, ConfigError, DirectoryInUse)
"""What ends the job: a checkpoint that cannot be written, a state that cannot be saved."""

_COPIES = 10
"""A boundary is held where its functions take as long as so many copies of its state."""

_LONG_WAIT_S = 5.0
"""A stop that waits longer for the end of a step is worth a word."""

_active: list[Session] = []


def active() -> Session | None:
    """What is open in this process."""
    return _active[-1] if _active else None


class Session:
    """Where one attempt is, and what it does between two steps."""

    def __init__(
        self,
        policy: Policy,
        name: str | None,
        live: StateRegistry,
        nan: NanPolicy,
        updater: Updater,
        evaluations: Evaluations,
        own: RunState,
    ) -> None:
        self._policy = policy
        self._name = name
        self._live = live
        self._nan = nan
        self._updater = updater
        self._evaluations = evaluations
        self._own = own
        self.step = 0
        """Steps done."""
        self.resumed_from: str | None = None
        self.callbacks: list[Any] = []
        self._loops = Loops()
        self._loaded: dict[str, Any] | None = None
        self._due: list[str] | None = None
        """Functions of `run.every` that are to run at this boundary; None: not known yet."""
        self._planned: int | None = None
        self._ended_rng: dict[str, Any] | None = None
        """The random state in which the last loop ended."""
        self._is_complete = False
        self.is_in_step = False
        self._group: Group = Solo()
        self._finished_by = ""
        """What `run.finish` was given, where that ended the last loop."""
        self._is_boundless = False
        """Whether an optimizer has stepped before the first loop."""
        self._hooks: list[Any] = []
        self._scales: list[RateScale] = []
        self._is_rehearsed = strikes.VARIABLE in os.environ
        self._held: Held | None = None
        self._hold_s = 0.0
        """Seconds that the last hold took."""
        self._is_between_loops = False
        """Whether the user's code runs outside a loop, after one."""
        self._pid = os.getpid()
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None
        self._leaving: Exit | None = None

    @property
    def epoch(self) -> int:
        """See `Loops.epoch`."""
        return self._loops.epoch

    # -- opening -------------------------------------------------------------------------------

    def open(self) -> None:
        """Claim, check, resume."""
        preflight.check_alone(is_inside=any(one._pid == os.getpid() for one in _active))
        # What cannot be saved is named now, not at a first save hours later.
        with preflight.exits():
            states = self._live.ask()
            built = Built(self._live.objects)
        self._live.check_savable(states)
        self._was_installed = stopping.is_installed()
        with preflight.exits():
            job, checkpoint_dir = job_dir.current(self._policy.checkpoint.dir, self._name)
        with preflight.told_to_parent(job, checkpoint_dir), preflight.exits():
            self._directory = RunDirectory(self._policy, self._name, self._nan, job, checkpoint_dir)
        self.metrics = self._directory.metrics
        try:
            self._handler = stopping.install(self._policy, forge_dir(job))
            stopping.hold_interrupts(is_held=True)
            with preflight.told_to_parent(job, checkpoint_dir), preflight.exits():
                self._owner = Owner(
                    checkpoint_dir,
                    job,
                    name=self._name or "",
                    built=built,
                    is_change_wanted=self._policy.resume is Resume.changed,
                )
                preflight.check_code(job, self._policy.requeue.on_code_change)
                preflight.check_health(self._policy.health, checkpoint_dir)
                self._resume()
                preflight.keep_threads(job, is_resumed=self.resumed_from is not None)
            self._live.fix_groups()
        except BaseException:
            self._release()
            raise
        policy = self._policy
        stop_s = policy.stop_s or policy.signal.lead_s
        self._limit = TimeLimit(os.environ, stop_s, folder=forge_dir(job))
        announcement = signal.Signals[f"SIG{policy.signal.name}"]
        due_s = min(stop_s, policy.signal.lead_s)
        self._handler.pass_over = lambda number: (
            number == announcement and self._limit.is_too_soon(due_s)
        )
        num_bytes = sum(p.numel() * p.element_size() for _, p in self._live.parameters())
        self._directory.saver.expect(num_bytes, float(os.environ.get(SAVE_WITHIN) or math.inf))
        if self._policy.nan.action is _ACTION.rollback or self._nan.lr_scale != 1:
            self._scales = [RateScale(self._nan, one) for one in self._live.optimizers]
        self._updater.note = self._directory.ledger.write
        self._handler.held_up_by = self._held_up_by
        self._hooks = [one.register_step_post_hook(self._updated) for one in self._live.optimizers]
        self._evaluations.pid = self._pid
        _active.append(self)
        spawned.once_parent_is_gone(self._stop_as_orphan)

    def _updated(self, *_: Any) -> None:
        """An optimizer has stepped, and no loop has begun so far."""
        if not self._is_boundless:
            self._is_boundless = True
            messages.warn(
                "An optimizer steps outside `run.steps`. Without it there is no step boundary, at"
                " which alone forge saves and stops: write `for step in run.steps(n):`"
            )

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _held_up_by(self) -> str:
        if not self.is_in_step:
            return ""
        return f". Step {self.step} had not ended{self._waited()}"

    def _log_wait(self) -> None:
        asked_at = self._handler.asked_at
        if asked_at is not None and time.monotonic() - asked_at > _LONG_WAIT_S:
            messages.warn(f"Step {self.step - 1} ended{self._waited()}")

    def _waited(self) -> str:
        asked_at = self._handler.asked_at or time.monotonic()
        return (
            f" {time.monotonic() - asked_at:.0f} s after the stop was asked for: if that is an"
            " evaluation, make it a function of `run.every`, in which a stop need not wait"
        )

    def _stop_as_orphan(self) -> None:
        if self in _active:
            messages.warn("The process that started this one is gone: saving and exiting")
            os.kill(os.getpid(), signal.SIGTERM)

    def _resume(self) -> None:
        found = self._directory.newest(self._live)
        if found is not None:
            self._load(found)
            self._is_complete = found.manifest.is_complete
            self.resumed_from = found.path.name
        self._owner.keep(self._directory.ledger)
        self._directory.store.job = self._owner.id
        self._directory.begin(self.step, self.resumed_from, is_complete=self._is_complete)

    def _load(self, found: Checkpoint) -> None:
        state, owned = found.state, found.fill()
        self._owner.adapt(state["live"]["states"], found.manifest.job, self._directory.ledger)
        self._live.load(state["live"], owned)
        self._nan.load_state_dict(state["nan"])
        if "overflows" in state:  # not of an older forge
            self._updater.overflows.load_state_dict(state["overflows"])
        self.metrics.restore(state.get("metrics", {}))
        self.step, self._planned = state["step"], state["planned"]
        self._loops.broken_off = set(state["broken_off"])
        self._finished_by = state.get("finished_by", "")  # not of an older forge
        self._own.restore(state)
        self._loaded, self._due = state, state["due"]

    def _state(self) -> dict[str, Any]:
        """Everything a checkpoint holds."""
        self._live.check_groups()
        self._updater.settle()
        return {
            "step": self.step,
            "planned": self._planned,
            "broken_off": sorted(self._loops.broken_off),
            "live": self._live.capture(),
            "nan": self._nan.state_dict(),
            "overflows": self._updater.overflows.state_dict(),
            "metrics": self.metrics.latest(),
            "positions": self._loops.states(),
            "rng": rng.capture(),
            "due": self._due,
            "finished_by": self._finished_by,
            **self._own.capture(),
        }

    # -- the loop ------------------------------------------------------------------------------

    def steps(self, n: int, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        loop = self._steps(n, loader)
        # Weak: after a break nothing else holds it, and it ends at once.
        self._loop = weakref.ref(loop)
        return loop

    def _steps(self, n: int, loader: Iterable[Any] | None) -> Generator[Any, None, None]:
        call = len(self._loops.positions)
        saved = self._loaded["positions"][call:] if self._loaded is not None else []
        has_ended = self._is_complete and self._planned is not None and n <= self._planned
        is_over = self.step >= n or call in self._loops.broken_off
        if has_ended or (is_over and not (self._due and len(saved) == 1)):
            # Nothing to do, but what follows finds the random state that this left behind.
            self._loops.begin(saved[0] if saved else None)
            if loader is not None and saved and saved[0] is not None:
                Position(loader).load_finished(saved[0])
            if self._loaded is not None:
                self._ended_rng = self._loaded.get("ended_rng") or self._loaded["rng"]
                rng.restore(self._ended_rng)
            return
        position = Position(loader) if loader is not None else None
        self._loops.begin(position)
        self._planned, self._is_complete = n, False
        self._finished_by = self._finished_by if is_over else ""
        self._is_between_loops = False
        self._forget_hooks()
        self._go_to(position, saved[0] if saved else None)
        if self.step == 0 and self._policy.nan.action is _ACTION.rollback:
            self._directory.saver.save(0, self._state, SaveCause.start)
        while True:
            if self._boundary(position, self.step if is_over else n):
                # What follows, an evaluation perhaps, belongs to this boundary.
                self.metrics.begin(self.step)
                self._updater.begin(self.step)
                self._ended_rng = rng.capture()
                self._is_between_loops = True
                return
            try:
                yield from self._one_step(position)
            except GeneratorExit:
                self._loops.broken_off.add(call)
                self._ended_rng = rng.capture()
                self._is_between_loops = True
                raise

    def _go_to(self, position: Position | None, saved: dict[str, Any] | None) -> None:
        """To the place in the data, and the random state, that were loaded, if any were."""
        if position is not None:
            for sentence in position.inexact():
                messages.warn(f"A resume is not exact here: {sentence}")
            if saved is not None:
                position.load(saved)
        loaded = self._loaded
        if loaded is not None and len(loaded["positions"]) == len(self._loops.positions):
            # Only now: making an iterator draws. A later loop keeps what the code before it drew.
            rng.restore(loaded["rng"])

    def _one_step(self, position: Position | None) -> Generator[Any, None, None]:
        batch = position.next() if position is not None else None
        self._ask(position)
        self._updater.begin(self.step)
        self.metrics.begin(self.step)
        self.is_in_step, has_counted = True, True
        try:
            yield (self.step, batch) if position is not None else self.step
        except GeneratorExit:  # break: the step counts if it changed anything
            has_counted = self._updater.has_updated
            raise
        finally:
            self.is_in_step = False
            self._updater.settle()
            if has_counted:
                self.step += 1
                self._due = None

    def _ask(self, position: Position | None) -> None:
        """Find what cannot say where it is before the first step, not at the stop."""
        try:
            if position is not None:
                position.ask()
        except ConfigError as error:
            self._leave(error.exit_code, str(error), "error", logging.ERROR)

    # -- a boundary ----------------------------------------------------------------------------

    def _boundary(self, position: Position | None, n: int) -> bool:
        """Between two steps: decide and act, until a step or the end of the loop is decided on.

        Returns:
            Whether the loop ends.
        """
        self._limit.arrive()
        self._arrive()
        if self._is_rehearsed:
            strikes.arrive()
        has_ended = self.step >= n
        while True:
            decision = self._decide(n)
            match decision:
                case Halt():
                    self._halt(decision)
                case Stop():
                    self._log_wait()
                    self._stop(decision.asked)
                case RollBack():
                    with self._failing():
                        self._roll_back(position, decision.first_bad)
                        self._arrive()
                    has_ended = self.step >= n
                    continue
                case Finish(asked=FinishAsked(text=text)):
                    self._end_loop(text)
            is_end = isinstance(decision, Finish)
            if self._due is None or (is_end and not has_ended):
                self._due = self._evaluations.due(self.step, is_end=is_end, is_rest=self._due == [])
                has_ended = is_end
            if isinstance(decision, Finish) and decision.stop is not None:
                self._log_wait()
                self._stop(decision.stop)
            if self._due:
                self._evaluate(self._due)
                continue
            match decision:
                case (Save() as save) | Finish(save=Save() as save):
                    self._save(save)
                case Finish():
                    return True
                case Go():
                    if self._limit.allows_step(self._directory.saver.cost_s):
                        return False
                    self._group.propose(self._stop_asked())

    def _arrive(self) -> None:
        """At this step: whether for the first time, or back from a later one."""
        self._loaded = None  # the second copy of the model is no longer needed
        self._directory.ledger.progress(self.step, self._planned)
        self.metrics.flush_if_due()

    def _decide(self, n: int) -> Decision:
        """Propose what this process knows by itself; decide by what all know."""
        saver, propose = self._directory.saver, self._group.propose
        try:
            self._live.check_groups()
            saver.check()
        except _ENDS as error:
            propose(Failed(int(error.exit_code), str(error)))
        if self._handler.should_shutdown():
            propose(self._stop_asked())
        if self._handler.take_save_request():
            propose(SaveAsked(self.step, rollbacks=self._nan.rollbacks))
        if saver.is_overdue(self.step):
            propose(SaveAsked(self.step, is_periodic=True, rollbacks=self._nan.rollbacks))
        known = Known(
            loop=len(self._loops.positions) - 1,
            n=n,
            every_steps=self._policy.checkpoint.every_steps,
            saved=saver.considered,
            nan=self._nan.wants,
            rollbacks=self._nan.rollbacks,
        )
        return decide(self._group.agreed(self.step), self.step, known)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Propose what ends the job: a checkpoint that cannot be written, a state not be saved."""
        try:
            yield
        except _ENDS as error:
            self._group.propose(Failed(int(error.exit_code), str(error)))

    def _stop_asked(self) -> StopAsked:
        """As the signal that was received asks, or for the time limit."""
        received = self._handler.signal_received
        if received is None:
            return StopAsked(int(ExitCode.REQUEUE), Reason.time_limit)
        code = int(self._handler.exit_code)
        return StopAsked(code, Reason.of_code(code), received.name)

    def finish(self, text: str) -> None:
        """See `Run.finish`."""
        if not (self.is_in_step or self._evaluations.is_running):
            raise ForgeError(
                "run.finish() was called outside the loop over run.steps, where nothing is left to"
                " end: call it in a step, or in a function of run.every."
            )
        loop = len(self._loops.positions) - 1
        self._group.propose(
            FinishAsked(loop, self.step + self.is_in_step, text, self._nan.rollbacks)
        )

    def _end_loop(self, text: str) -> None:
        """As a break does, and with a word: a start from here on finds the loop ended."""
        self._finished_by = text
        self._loops.broken_off.add(len(self._loops.positions) - 1)
        self._directory.ledger.progress(self.step, self.step)

    def _evaluate(self, due: list[str]) -> None:
        """Run functions of `run.every`; what they log belongs to the last step done."""
        self.metrics.begin(self.step - 1)
        if self._evaluations.last_s(due) >= _COPIES * self._hold_s:
            began = time.monotonic()
            with self._failing():
                self._held = self._directory.saver.hold(self.step, self._state)
            self._hold_s = time.monotonic() - began
            if self._held is None:
                return
        try:
            with self._watched():
                self._evaluations.run(due, self.step, before_each=self.poll)
                self._raise_again()
        except Exception as error:
            if self._held is not None and (self._handler.explains(error) or self.is_stopping):
                messages.warn(f"{type(error).__name__}: {error}, after a stop was asked for")
                self._stop(self._stop_asked())
            raise
        if self._held is None:
            self._limit.arrive()  # a stop had to wait for them
        self._held, self._due = None, []
        self._directory.saver.evaluated(self.step)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        held = self._held
        return contextlib.nullcontext() if held is None else held.watched(lambda: self.is_stopping)

    def _raise_again(self) -> None:
        """Something has swallowed the exit: a stop still is a stop."""
        if self._leaving is not None:
            raise self._leaving

    def _save(self, save: Save) -> None:
        cause = SaveCause.periodic if save.is_periodic else SaveCause.requested
        with self._failing():
            self.metrics.flush()
            self._directory.saver.save(self.step, self._state, cause)

    def request_save(self, *, pin: bool) -> None:
        """See `Run.save`."""
        if pin:
            self._directory.pin(self.step + self.is_in_step)
        if self.is_in_step or self._evaluations.is_running:
            self._group.propose(
                SaveAsked(self.step + self.is_in_step, rollbacks=self._nan.rollbacks)
            )
        else:
            self._save_now()

    def _save_now(self) -> None:
        is_between_loops, self._is_between_loops = self._is_between_loops, False
        state = self._final_state if is_between_loops else self._state
        with preflight.exits():
            self.metrics.flush()
            self._directory.saver.save(self.step, state, SaveCause.requested)
        self._is_between_loops = is_between_loops

    def checkpoint(self) -> None:
        """Save what can be, wherever the main thread was interrupted; log what there is."""
        if self._held is not None:
            self._held.commit()
        elif self._is_between_loops:
            self._save_now()
            self._directory.saver.wait()
        messages.say(f"The job resumes from its last checkpoint: {self._directory.in_place()}")

    @property
    def is_stopping(self) -> bool:
        """Whether a signal, or the time limit, asks for a stop."""
        cost_s = self._directory.saver.cost_s
        return self._handler.should_shutdown() or self._limit.is_near(cost_s)

    def poll(self) -> None:
        """See `Run.poll`."""
        self._raise_again()
        if self._held is not None and self.is_stopping:
            self._stop(self._stop_asked())

    def _stop(self, asked: StopAsked, *, should_save: bool = True) -> NoReturn:
        """Save and leave."""
        name = asked.signal or asked.reason.value
        self._handler.begin_deadline()
        self.metrics.flush()
        if should_save:
            try:
                if self._held is not None:
                    self._held.commit()
                else:
                    saver = self._directory.saver
                    saver.save_final(self.step, self._state, SaveCause.stop)
            except (CheckpointError, ConfigError, DirectoryInUse) as error:
                self._leave(error.exit_code, f"{name}, but {error}", "error", logging.ERROR)
        if asked.signal is None:
            details: dict[str, Any] = {"left_s": round(self._limit.left_s, 1)}
        else:
            name, details = f"stopped by {name}", {"signal": asked.signal}
        self._leave(asked.code, name, "stop", reason=asked.reason, **details)

    def _halt(self, halt: Halt) -> NoReturn:
        if halt.code != ExitCode.HALTED:
            self._leave(halt.code, halt.text, "error", logging.ERROR)
        self.metrics.flush()
        self._directory.saver.finish()
        text = f"halted by the NaN policy: {halt.text}. {self._directory.in_place()}"
        self._leave(halt.code, text, "halt", logging.ERROR)

    def _roll_back(self, position: Position | None, first_bad: int) -> None:
        """To the newest good checkpoint far enough before the first bad step."""
        self._directory.saver.wait()
        at_most = first_bad - self._policy.nan.rollback.steps_back
        found = self._directory.rollback_target(self._live, at_most)
        call = len(self._loops.positions) - 1
        if found is None or len(found.state["positions"]) != call + 1:
            text = (
                f"step {first_bad} is bad, but there is no good checkpoint of this loop at step"
                f" {at_most} or before it to roll back to"
            )
            self._halt(Halt(text))
        nan, bad_step = self._nan.state_dict(), self.step
        self.metrics.flush()
        self._load(found)
        self._nan.load_state_dict(nan)  # budgets are not rolled back
        self._nan.rolled_back()
        if position is not None and not self._policy.nan.rollback.skip_data:
            position.load(found.state["positions"][call])
        rng.restore(found.state["rng"])
        self._directory.store.discard_after(self.step)
        self._directory.saver.begin(self.step)
        self._directory.ledger.write(
            "rollback", step=self.step, first_bad=first_bad, from_step=bad_step
        )
        messages.warn(
            f"Rolled back from step {bad_step} to step {self.step}"
            f" ({self._nan.rollbacks} of {self._policy.nan.rollback.max_rollbacks}), learning rate"
            f" times {self._nan.lr_scale:g}"
        )

    # -- leaving -------------------------------------------------------------------------------

    def _leave(
        self,
        code: int,
        text: str,
        kind: str,
        level: int = logging.INFO,
        reason: Reason | None = None,
        **details: Any,
    ) -> NoReturn:
        """Log, run the callbacks, end the children, raise; the reason is by default the code's."""
        reason = reason or Reason.of_code(code)
        self._directory.end(kind, reason, text, self.step, code, level, **details)
        self._loops.close()  # a DataLoader's workers end in their own way, before all others
        self._leaving = stopping.leave(int(code), text, reason)
        raise self._leaving

    def close(self, error: BaseException | None) -> None:
        """The end of the `with` block, reached with or without an error."""
        if os.getpid() != self._pid:
            return  # a child that was forked inside the block
        self._is_between_loops = False
        try:
            if self._leaving is not None:
                if error is not self._leaving:
                    raise self._leaving  # something swallowed it: a stop still is a stop
            elif error is None:
                self._finish()
            elif self._handler.explains(error):
                self._stop(self._stop_asked(), should_save=False)  # in the middle of a step
            elif not isinstance(error, Exit):
                self._directory.fail(f"{type(error).__name__}: {error}", self.step)
        finally:
            self._release()

    def _finish(self) -> None:
        """The loop ended: by itself or by break."""
        loop = self._loop() if self._loop is not None else None
        if loop is not None:
            loop.close()  # after a break, where somebody still holds it
        if isinstance(self._nan.wants, Halt):
            self._halt(self._nan.wants)
        self.metrics.flush()
        with preflight.exits():
            self._directory.saver.save_final(self.step, self._final_state, SaveCause.finished)
        if self._is_complete and self._loaded is not None:
            rng.restore(self._loaded["rng"])  # what follows is to draw as it did at first
        self._directory.finish(self.step, self._finished_by)

    def _final_state(self) -> dict[str, Any]:
        """What follows the loop inside the `with` block runs again at a later start, and draws."""
        return self._state() | {"ended_rng": self._ended_rng}

    def _release(self) -> None:
        if self in _active:
            _active.remove(self)
        self._loops.close()
        try:
            self._directory.release()
        finally:
            self._forget_hooks()
            for callback in self.callbacks:
                stopping.remove_callback(callback)
            for scale in self._scales:
                scale.remove()
            if self._leaving is None:
                stopping.hold_interrupts(is_held=False)
                if not self._was_installed:
                    stopping.uninstall()
