"""The life of an enabled `forge.Run`, from entering to leaving: its step boundaries.

One module, since whatever happens at a boundary reads and changes the same few facts.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

from forge import messages
from forge.checkpoint import Checkpoint
from forge.config.schema import NanAction, Policy, Resume
from forge.data.position import Position
from forge.errors import CheckpointError, ConfigError, DirectoryInUse, Exit, ExitCode, Reason
from forge.jobdir import job_dir
from forge.jobdir.job_files import SAVE_WITHIN, forge_dir
from forge.process.time_limit import TimeLimit
from forge.shutdown import stopping
from forge.state import rng
from forge.state.built import Built
from forge.state.registry import LiveState
from forge.training import preflight, strikes
from forge.training.loops import Calls
from forge.training.nan_policy import NanPolicy, RateScale
from forge.training.owner import Owner
from forge.training.replay import HeldBatch, Marker, batch_of, replay_of
from forge.training.run_directory import Holdings
from forge.training.saver import SaveCause
from forge.training.update import Updater

_ACTION: Any = NanAction


class Session:
    """Where one attempt is, and what it does between two steps."""

    def __init__(
        self,
        policy: Policy,
        name: str | None,
        live: LiveState,
        nan: NanPolicy,
        updater: Updater,
    ) -> None:
        self._policy = policy
        self._name = name
        self._live = live
        self._nan = nan
        self._updater = updater
        self._marker = Marker(live, updater)
        self.step = 0
        """Steps done."""
        self.resumed_from: str | None = None
        self.callbacks: list[Any] = []
        self._calls = Calls()
        self._loaded: dict[str, Any] | None = None
        self._replay: dict[str, Any] | None = None
        self._planned: int | None = None
        self._ended_rng: dict[str, Any] | None = None
        """The random state in which the last loop ended."""
        self._is_complete = False
        self._is_in_step = False
        self._has_begun = False
        self._is_save_requested = False
        self._pid = os.getpid()
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None
        self._leaving: Exit | None = None

    @property
    def epoch(self) -> int:
        """See `Calls.epoch`."""
        return self._calls.epoch

    # -- opening -------------------------------------------------------------------------------

    def open(self) -> None:
        """Claim, check, resume."""
        # What cannot be saved is named now, not at a first save hours later.
        with preflight.exits():
            states = self._live.ask()
            built = Built(self._live.objects)
        self._live.check_savable(states)
        self._was_installed = stopping.is_installed()
        with preflight.exits():
            job, checkpoint_dir = job_dir.current(self._policy.checkpoint.dir, self._name)
        with preflight.told_to_parent(job, checkpoint_dir), preflight.exits():
            self._disk = Holdings(self._policy, self._name, self._nan, job, checkpoint_dir)
        self.metrics = self._disk.metrics
        try:
            self._handler = stopping.install(self._policy, forge_dir(job))
            stopping.hold_interrupts(True)
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
                preflight.keep_threads(job, self.resumed_from is not None)
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
        self._disk.saver.expect(num_bytes, float(os.environ.get(SAVE_WITHIN) or math.inf))
        self._scales = [RateScale(self._nan, one) for one in self._live.optimizers]
        self._updater.after_update = self._marker.updated
        self._updater.note = self._disk.ledger.write

    def _resume(self) -> None:
        found = self._disk.newest(self._live)
        if found is not None:
            self._load(found)
            self._is_complete = found.manifest.is_complete
            self.resumed_from = found.path.name
        self._owner.keep(self._disk.ledger)
        self._disk.store.job = self._owner.id
        self._disk.begin(self.step, self.resumed_from, self._replay is not None, self._is_complete)

    def _load(self, found: Checkpoint) -> None:
        state, owned = found.state, found.fill()
        self._owner.adapt(state["live"]["states"], found.manifest.job, self._disk.ledger)
        self._live.load(state["live"], owned, is_kept=state["replay"] is not None)
        self._nan.load_state_dict(state["nan"])
        if "overflows" in state:  # not of an older forge
            self._updater.overflows.load_state_dict(state["overflows"])
        self.metrics.restore(state.get("metrics", {}))
        self.step, self._planned = state["step"], state["planned"]
        self._calls.broken_off = set(state["broken_off"])
        self._marker.is_used |= state["uses_poll"]
        self._loaded, self._replay = state, state["replay"]

    def _state(
        self, replay: dict[str, Any] | None = None, is_marked: bool = False
    ) -> dict[str, Any]:
        """Everything a checkpoint holds; with the random state of the mark, if asked for."""
        self._live.check_groups()
        self._updater.settle()
        return {
            "step": self.step,
            "planned": self._planned,
            "broken_off": sorted(self._calls.broken_off),
            "live": self._live.capture(),
            "nan": self._nan.state_dict(),
            "overflows": self._updater.overflows.state_dict(),
            "metrics": self.metrics.latest(),
            "positions": self._calls.states(),
            "rng": self._marker.rng if is_marked else rng.capture(),
            "replay": replay,
            "uses_poll": self._marker.is_used,
        }

    # -- the loop ------------------------------------------------------------------------------

    def steps(self, n: int, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        loop = self._steps(n, loader)
        # Weak: after a break nothing else holds it, and it ends at once.
        self._loop = weakref.ref(loop)
        return loop

    def _steps(self, n: int, loader: Iterable[Any] | None) -> Generator[Any, None, None]:
        call = len(self._calls.positions)
        saved = self._loaded["positions"][call:] if self._loaded is not None else []
        has_ended = self._is_complete and self._planned is not None and n <= self._planned
        if self.step >= n or has_ended or call in self._calls.broken_off:
            # Nothing to do, but what follows finds the random state that this left behind.
            self._calls.begin(saved[0] if saved else None)
            if loader is not None and saved and saved[0] is not None:
                Position(loader).load_finished(saved[0])
            if self._loaded is not None:
                self._ended_rng = self._loaded.get("ended_rng") or self._loaded["rng"]
                rng.restore(self._ended_rng)
            return
        position = Position(loader) if loader is not None else None
        self._calls.begin(position)
        self._planned, self._is_complete, self._has_begun = n, False, True
        self._go_to(position, saved[0] if saved else None)
        if self.step == 0 and self._policy.nan.action is _ACTION.rollback:
            self._disk.saver.save(0, self._state, SaveCause.start)
        while True:
            self._boundary(position)
            if self.step >= n:
                # What follows, an evaluation perhaps, belongs to this boundary.
                self.metrics.begin(self.step, set())
                self._updater.begin(self.step)
                self._marker.mark()
                self._ended_rng = self._marker.rng
                return
            step = self.step
            try:
                yield from self._one_step(position)
            except GeneratorExit:
                self._calls.break_off(call, step)
                self._ended_rng = rng.capture()
                raise

    def _go_to(self, position: Position | None, saved: dict[str, Any] | None) -> None:
        """To the place in the data, and the random state, that were loaded, if any were."""
        if position is not None:
            for sentence in position.inexact():
                messages.warn(f"A resume is not exact here: {sentence}")
            if saved is not None:
                position.load(saved)
        loaded = self._loaded
        if loaded is not None and len(loaded["positions"]) == len(self._calls.positions):
            # Only now: making an iterator draws. A later loop keeps what the code before it drew.
            rng.restore(loaded["rng"])

    def _one_step(self, position: Position | None) -> Generator[Any, None, None]:
        self._updater.begin(self.step)
        replay, self._replay = self._replay, None
        if replay is not None:
            batch = batch_of(replay)
            self.metrics.begin(self.step, set(replay["logged"]))
            if replay["losses"]:
                rng.restore(replay["begin_rng"])
                self._updater.repeat(replay["losses"], self._restore_after_update)
        else:
            if self._marker.is_used:
                self._marker.mark()  # reading may fail while a stop is pending: see `close`
            batch = position.next() if position is not None else None
            self._ask(position)
            self.metrics.begin(self.step, set())
        self._batch = HeldBatch(batch)
        self._marker.begin()
        self._is_in_step = True
        try:
            yield (self.step, batch) if position is not None else self.step
        except GeneratorExit:  # break: the step counts if it changed anything
            self.step += self._updater.has_updated
            raise
        finally:
            self._is_in_step = False
            self._updater.settle()
        self._updater.end()
        self.step += 1

    def _ask(self, position: Position | None) -> None:
        """Find what cannot say where it is before the first step, not at the stop."""
        try:
            if position is not None:
                position.ask()
        except ConfigError as error:
            self._leave(error.exit_code, str(error), "error", logging.ERROR)

    def _restore_after_update(self) -> None:
        """The repeated step has come to its update: back to the state after it."""
        assert self._loaded is not None
        self._live.load(self._loaded["live"])
        self._nan.load_state_dict(self._loaded["nan"])
        rng.restore(self._loaded["rng"])
        self._loaded = None
        self._marker.updated()

    # -- a boundary ----------------------------------------------------------------------------

    def _boundary(self, position: Position | None) -> None:
        """Between two steps: roll back, halt, stop or save, whatever is due."""
        self._limit.arrive()
        try:
            self._live.check_groups()
            if self._nan.halt_reason is not None:
                self._halt(self._nan.halt_reason)
            if self._nan.rollback_from is not None:
                self._roll_back(position)
            if self._replay is None:
                self._loaded = None  # the second copy of the model is no longer needed
            self._disk.ledger.progress(self.step, self._planned)
            self.metrics.flush_if_due()
            self._disk.saver.check()
            strikes.arrive()
            if self._handler.should_shutdown():
                self._stop()
            if self._handler.take_save_request() or self._is_save_requested:
                self._is_save_requested = False
                self._save(SaveCause.requested)
            elif self._disk.saver.is_due(self.step):
                self._save(SaveCause.periodic)
            if not self._limit.allows_step(self._disk.saver.cost_s):
                self._stop()
        except (CheckpointError, ConfigError, DirectoryInUse) as error:
            self._leave(error.exit_code, str(error), "error", logging.ERROR)

    def _save(self, cause: SaveCause) -> None:
        self.metrics.flush()
        self._disk.saver.save(self.step, self._state, cause)

    def request_save(self, pin: bool) -> None:
        """See `Run.save`."""
        if pin:
            self._disk.pin(self.step + self._is_in_step)
        if self._is_in_step:
            self._is_save_requested = True
        else:
            with preflight.exits():
                self._save(SaveCause.requested)

    def poll(self) -> bool:
        """See `Run.poll`."""
        self._marker.is_used = True
        is_wanted = self._handler.should_shutdown() or self._limit.is_near(self._disk.saver.cost_s)
        if is_wanted or self._limit.is_probe_due():
            stop = self._way_out()
            if stop is not None:
                self._limit.arrive()
                if is_wanted:
                    stop()
        return is_wanted

    def _way_out(self) -> Callable[[], NoReturn] | None:
        """How to stop at this very moment; None where a resume could not be exact here."""
        if not self._has_begun:  # nothing was trained: what is on disk is all there is
            return partial(self._stop, should_save=False)
        if not self._is_in_step:  # between or after the loops
            return partial(self._stop, is_marked=True) if self._marker.is_exact() else None
        if self._nan.halt_reason is not None or self._nan.rollback_from is not None:
            return None  # the boundary decides what becomes of this state
        if self._updater.is_repeating:  # the checkpoint we came from is this very state
            return partial(self._stop, should_save=False)
        replay = replay_of(self._batch, self._marker, self._updater, self.metrics)
        return None if replay is None else partial(self._stop, replay, is_marked=True)

    def _stop(
        self,
        replay: dict[str, Any] | None = None,
        should_save: bool = True,
        is_marked: bool = False,
    ) -> NoReturn:
        """Save and leave, as the signal that was received asks, or for the time limit."""
        received, reason, code = (
            self._handler.signal_received,
            Reason.time_limit,
            int(ExitCode.REQUEUE),
        )
        name: str = reason.value
        if received is not None:
            name, code = received.name, self._handler.exit_code
            reason = Reason.of_code(code)
        self._handler.begin_deadline()
        self.metrics.flush()
        if should_save:
            try:
                self._disk.saver.save_final(
                    self.step, lambda: self._state(replay, is_marked), SaveCause.stop
                )
            except (CheckpointError, ConfigError, DirectoryInUse) as error:
                self._leave(error.exit_code, f"{name}, but {error}", "error", logging.ERROR)
        if received is None:
            self._leave(code, name, "stop", reason=reason, left_s=round(self._limit.left_s, 1))
        self._leave(code, f"stopped by {name}", "stop", reason=reason, signal=name)

    def _halt(self, reason: str) -> NoReturn:
        self._disk.metrics.flush()
        self._disk.saver.wait()
        self._leave(
            ExitCode.HALTED,
            f"halted by the NaN policy: {reason}. {self._disk.in_place()}",
            "halt",
            logging.ERROR,
        )

    def _roll_back(self, position: Position | None) -> None:
        """To the newest good checkpoint far enough before the first bad step."""
        self._disk.saver.wait()
        first_bad = self._nan.rollback_from
        assert first_bad is not None
        at_most = first_bad - self._policy.nan.rollback.steps_back
        found = self._disk.rollback_target(self._live, at_most)
        call = len(self._calls.positions) - 1
        if found is None or len(found.state["positions"]) != call + 1:
            self._halt(
                f"step {first_bad} is bad, but there is no good checkpoint of this loop at step"
                f" {at_most} or before it to roll back to"
            )
        nan, bad_step = self._nan.state_dict(), self.step
        self.metrics.flush()
        self._load(found)
        self._nan.load_state_dict(nan)
        self._nan.rolled_back()
        found.state["nan"] = self._nan.state_dict()  # budgets are not rolled back
        if position is not None and not self._policy.nan.rollback.skip_data:
            position.load(found.state["positions"][call])
        rng.restore(found.state["rng"])
        self._disk.store.discard_after(self.step)
        self._disk.saver.begin(self.step)
        self._disk.ledger.write("rollback", step=self.step, first_bad=first_bad, from_step=bad_step)
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
        """Tell, run the callbacks, end the children, raise; the reason is by default the code's."""
        reason = reason or Reason.of_code(code)
        self._disk.end(kind, reason, text, self.step, code, level, **details)
        self._calls.close()  # a DataLoader's workers end in their own way, before all others
        self._leaving = stopping.leave(int(code), text, reason)
        raise self._leaving

    def close(self, error: BaseException | None) -> None:
        """The end of the `with` block, reached with or without an error."""
        if os.getpid() != self._pid:
            return  # a child that was forked inside the block
        try:
            if self._leaving is not None:
                if error is not self._leaving:
                    raise self._leaving  # something swallowed it: a stop still is a stop
            elif error is None:
                self._finish()
            elif self._handler.explains(error):
                self._stop_in_error()
                self._stop(should_save=False)
            elif not isinstance(error, Exit):
                self._disk.fail(f"{type(error).__name__}: {error}", self.step)
                if isinstance(error, Exception) and self._handler.should_shutdown():
                    self._stop_in_error()  # the signal hit a helper first
        finally:
            self._release()

    def _stop_in_error(self) -> None:
        """A signal brought an error about: save and leave, if this state is exact."""
        step = self._calls.take_break_back()
        if step is not None:  # an error that leaves a loop closes it as a break does
            self.step, self._is_in_step = step, True
        self.poll()

    def _finish(self) -> None:
        """The loop ended: by itself or by break."""
        loop = self._loop() if self._loop is not None else None
        if loop is not None:
            loop.close()  # after a break, where somebody still holds it
        if self._nan.halt_reason is not None:
            self._halt(self._nan.halt_reason)
        self.metrics.flush()
        with preflight.exits():
            self._disk.saver.save_final(self.step, self._final_state, SaveCause.finished)
        if self._is_complete and self._loaded is not None:
            rng.restore(self._loaded["rng"])  # what follows is to draw as it did at first
        self._disk.finish(self.step)

    def _final_state(self) -> dict[str, Any]:
        """What follows the loop inside the `with` block runs again at a later start, too."""
        return self._state() | {"ended_rng": self._ended_rng}

    def _release(self) -> None:
        self._calls.close()
        try:
            self._disk.release()
        finally:
            for callback in self.callbacks:
                stopping.remove_callback(callback)
            for scale in getattr(self, "_scales", ()):
                scale.remove()
            if self._leaving is None:
                stopping.hold_interrupts(False)
                if not self._was_installed:
                    stopping.uninstall()
