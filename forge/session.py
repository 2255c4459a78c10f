"""The life of an enabled `forge.Run`, from entering to leaving: its step boundaries."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from forge import job_dir, messages, rng, startup, stopping, verdict
from forge.checkpoint import Store
from forge.config import NanAction, Policy
from forge.errors import CheckpointError, ConfigError, DirectoryInUse, Exit, ExitCode, ForgeError
from forge.ledger import Ledger, forge_dir
from forge.live_state import LiveState
from forge.metrics import Metrics
from forge.nan_policy import NanPolicy, RateScale
from forge.position import Position
from forge.replay import Marker
from forge.rules import directory_problem
from forge.saver import Saver
from forge.update import Updater

_ACTION: Any = NanAction


class Session:
    """What one attempt holds open: directory, ledger, signal handler; and where it is."""

    def __init__(self, policy: Policy, live: LiveState, nan: NanPolicy, updater: Updater) -> None:
        self._policy = policy
        self._live = live
        self._nan = nan
        self._updater = updater
        self._marker = Marker(live, updater)
        self.step = 0
        """Steps done."""
        self.resumed_from: str | None = None
        self.callbacks: list[Any] = []
        self._positions: list[Position | dict[str, Any] | None] = []
        self._loaded: dict[str, Any] | None = None
        self._replay: dict[str, Any] | None = None
        self._planned: int | None = None
        self._is_complete = False
        self._is_in_step = False
        self._is_save_requested = False
        self._leaving: Exit | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the loader that is being read; 0 without one."""
        position = self._positions[-1] if self._positions else None
        return position.epoch if isinstance(position, Position) else 0

    # -- opening -------------------------------------------------------------------------------

    def open(self) -> None:
        """Claim, check, resume."""
        # What cannot be saved is named now, not at a first save hours later.
        Store.check_savable(self._live.capture())
        self.job_dir, self._checkpoint_dir = job_dir.current(self._policy.checkpoint.dir)
        self._was_installed = stopping.is_installed()
        with startup.exits():
            self._claim()
        try:
            self._handler = stopping.install(self._policy, forge_dir(self.job_dir))
            stopping.hold_interrupts(True)
            with startup.exits():
                startup.check_code(self.job_dir, self._policy.requeue.on_code_change)
                startup.check_health(self._policy.health, self._checkpoint_dir)
                self._resume()
        except BaseException:
            self._release()
            raise
        self._scales = [RateScale(self._nan, one) for one in self._live.optimizers]
        self._updater.after_update = self._marker.updated

    def _claim(self) -> None:
        policy = self._policy
        problem = directory_problem(self._checkpoint_dir)
        if problem:
            key = f"`resilience.checkpoint.dir={policy.checkpoint.dir}`"
            raise ConfigError([f"{key} ({self._checkpoint_dir}): {problem}"])
        back = policy.nan.rollback.steps_back + policy.nan.max_consecutive
        self._store = Store(
            self._checkpoint_dir,
            policy.checkpoint,
            config_hash=job_dir.config_hash(self.job_dir),
            keep_back_steps=back if policy.nan.action is _ACTION.rollback else None,
        )
        self._ledger = Ledger(self.job_dir)
        self._store.attempt = self._ledger.attempt
        self._saver = Saver(self._store, policy.checkpoint, self._ledger)
        self.metrics = Metrics(self._ledger)
        verdict.clear(self.job_dir)
        self._command = job_dir.resume_command(self.job_dir)
        job_dir.write_resume_script(self.job_dir, self._command)

    def _resume(self) -> None:
        found = self._store.newest()
        for reason in self._store.passed_over:
            messages.warn(f"Passed over {reason}")
        if found is not None:
            self._load(found.state)
            self._is_complete = found.manifest.is_complete
            self.resumed_from = found.path.name
        self._ledger.write(
            "start",
            step=self.step,
            resumed_from=self.resumed_from,
            passed_over=self._store.passed_over,
            previous_step=self._ledger.previous_step,
            replays=self._replay is not None,
            **startup.whoami(),
        )
        self._ledger.progress(self.step)
        self._saver.begin(self.step if found else None)
        self.metrics.begin(self.step, set())
        begins = f"goes on at step {self.step}" if found else "begins at step 0"
        messages.say(f"Training {begins}; checkpoints in {self._store.directory}")
        messages.say(f"To go on with this job after a stop:\n  {self._command}")

    def _load(self, state: dict[str, Any]) -> None:
        self._live.load(state["live"])
        self._nan.load_state_dict(state["nan"])
        self.step, self._planned = state["step"], state["planned"]
        self._marker.is_used |= state["uses_poll"]
        self._loaded, self._replay = state, state["replay"]

    def _state(self, replay: dict[str, Any] | None = None) -> dict[str, Any]:
        """Everything a checkpoint holds."""
        positions = [p.state() if isinstance(p, Position) else p for p in self._positions]
        return {
            "step": self.step,
            "planned": self._planned,
            "live": self._live.capture(),
            "nan": self._nan.state_dict(),
            "positions": positions,
            "rng": rng.capture() if replay is None else self._marker.rng,
            "replay": replay,
            "uses_poll": self._marker.is_used,
        }

    # -- the loop ------------------------------------------------------------------------------

    def steps(self, n: int, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        call = len(self._positions)
        saved = self._loaded["positions"][call:] if self._loaded is not None else []
        has_ended = self._is_complete and (self._planned is None or n <= self._planned)
        if self.step >= n or has_ended:
            # Nothing to do here, but what follows finds the random state that this left behind.
            self._positions.append(saved[0] if saved else None)
            if self._loaded is not None:
                rng.restore(self._loaded["rng"])
            return
        position = Position(loader) if loader is not None else None
        self._positions.append(position)
        self._planned, self._is_complete = n, False
        self._go_to(position, saved[0] if saved else None)
        if self.step == 0 and self._policy.nan.action is _ACTION.rollback:
            self._saver.save(0, self._state, "start")
        while True:
            self._boundary(position)
            if self.step >= n:
                return
            yield from self._one_step(position)

    def _go_to(self, position: Position | None, saved: dict[str, Any] | None) -> None:
        """To the place in the data, and the random state, that were loaded, if any were."""
        if position is not None:
            for sentence in position.inexact():
                messages.warn(f"A resume is not exact here: {sentence}")
            if saved is not None:
                position.load(saved)
        if self._loaded is not None:
            # Only now: making an iterator draws.
            rng.restore(self._loaded["rng"])

    def _one_step(self, position: Position | None) -> Iterator[Any]:
        self._updater.begin(self.step)
        replay, self._replay = self._replay, None
        if replay is not None:
            batch = replay["batch"]
            self.metrics.begin(self.step, set(replay["logged"]))
            if replay["has_updated"]:
                self._updater.restore = self._restore_after_update
        else:
            batch = position.next() if position is not None else None
            self.metrics.begin(self.step, set())
        self._batch = batch
        self._marker.begin()
        self._is_in_step = True
        try:
            yield (self.step, batch) if position is not None else self.step
        except GeneratorExit:  # break: the step counts if it changed anything
            self.step += self._updater.has_updated
            raise
        finally:
            self._is_in_step = False
        if self._updater.restore is not None:
            raise ForgeError(
                f"Step {self.step} was saved after its run.update(), but run.update() was not"
                " called when the step was repeated. Has the training script changed?"
            )
        self.step += 1

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
        try:
            if self._nan.halt_reason is not None:
                self._halt(self._nan.halt_reason)
            if self._nan.rollback_from is not None:
                self._roll_back(position)
            if self._replay is None:
                self._loaded = None  # the second copy of the model is not needed any more
            self._ledger.progress(self.step)
            self.metrics.flush_if_due()
            self._saver.check()
            if self._handler.should_shutdown():
                self._stop()
            if self._handler.take_save_request() or self._is_save_requested:
                self._is_save_requested = False
                self._save("requested")
            elif self._saver.is_due(self.step):
                self._save("periodic")
        except (CheckpointError, DirectoryInUse) as error:
            self._leave(error.exit_code, str(error), "error", logging.ERROR)

    def _save(self, reason: str) -> None:
        self.metrics.flush()
        self._saver.save(self.step, self._state, reason)

    def request_save(self) -> None:
        """See `Run.save`."""
        if self._is_in_step:
            self._is_save_requested = True
        else:
            with startup.exits():
                self._save("requested")

    def poll(self) -> bool:
        """See `Run.poll`."""
        self._marker.is_used = True
        if not self._handler.should_shutdown():
            return False
        if not self._is_in_step:
            self._stop()
        if self._updater.restore is not None:
            self._stop(should_save=False)  # the checkpoint we came from is this very state
        if not self._marker.is_exact():
            return True
        replay = {
            "batch": self._batch,
            "has_updated": self._updater.has_updated,
            "logged": sorted(self.metrics.logged),
        }
        if not Store.is_savable(replay):
            return True
        self._stop(replay)

    def _stop(self, replay: dict[str, Any] | None = None, should_save: bool = True) -> NoReturn:
        """Save and leave, as the signal that was received asks."""
        received = self._handler.signal_received
        assert received is not None
        name, code = received.name, self._handler.exit_code
        self.metrics.flush()
        if should_save:
            try:
                self._saver.save_final(self.step, lambda: self._state(replay), False, name)
            except (CheckpointError, DirectoryInUse) as error:
                self._leave(error.exit_code, f"{name}, but {error}", "error", logging.ERROR)
        self._leave(code, f"stopped by {name}", "stop", signal=name)

    def _halt(self, reason: str) -> NoReturn:
        self._saver.wait()
        self._leave(
            ExitCode.HALTED,
            f"halted by the NaN policy: {reason}. The last good checkpoint is in place",
            "halt",
            logging.ERROR,
        )

    def _roll_back(self, position: Position | None) -> None:
        """To the newest good checkpoint far enough before the first bad step."""
        self._saver.wait()
        first_bad = self._nan.rollback_from
        assert first_bad is not None
        at_most = first_bad - self._policy.nan.rollback.steps_back
        found = self._store.newest(at_most=at_most)
        call = len(self._positions) - 1
        if found is None or len(found.state["positions"]) != call + 1:
            self._halt(
                f"step {first_bad} is bad, but there is no good checkpoint of this loop at step"
                f" {at_most} or before it to roll back to"
            )
        nan, bad_step = self._nan.state_dict(), self.step
        self.metrics.flush()
        self._load(found.state)
        self._nan.load_state_dict(nan)
        self._nan.rolled_back()
        found.state["nan"] = self._nan.state_dict()  # the budgets are not rolled back
        if position is not None and not self._policy.nan.rollback.skip_data:
            position.load(found.state["positions"][call])
        rng.restore(found.state["rng"])
        self._store.discard_after(self.step)
        self._saver.begin(self.step)
        self._ledger.write("rollback", step=self.step, first_bad=first_bad, from_step=bad_step)
        messages.warn(
            f"Rolled back from step {bad_step} to step {self.step}"
            f" ({self._nan.rollbacks} of {self._policy.nan.rollback.max_rollbacks}), learning rate"
            f" times {self._nan.lr_scale:g}"
        )

    # -- leaving -------------------------------------------------------------------------------

    def _leave(
        self, code: int, reason: str, kind: str, level: int = logging.INFO, **details: Any
    ) -> NoReturn:
        """Tell, run the callbacks, end the children, raise."""
        verdict.write(self.job_dir, reason, self.step, code)
        self._ledger.write(kind, reason=reason, step=self.step, code=int(code), **details)
        messages.say(
            f"{reason} at step {self.step}, exit code {int(code)}. To go on:\n  {self._command}",
            level,
        )
        self._close_positions()  # a DataLoader's workers end in their own way, before all others
        self._leaving = stopping.leave(int(code), reason)
        raise self._leaving

    def close(self, error: BaseException | None) -> None:
        """The end of the `with` block, reached with or without an error."""
        try:
            if self._leaving is not None:
                if error is not self._leaving:
                    raise self._leaving  # something swallowed it: a stop still is a stop
            elif error is None:
                self._finish()
            elif not isinstance(error, Exit):
                self._fail(error)
        finally:
            self._release()

    def _finish(self) -> None:
        """The loop ended: by itself or by break."""
        if self._nan.halt_reason is not None:
            self._halt(self._nan.halt_reason)
        self.metrics.flush()
        with startup.exits():
            self._saver.save_final(self.step, self._state, True, "finished")
        self._ledger.write("finish", step=self.step)
        verdict.write(self.job_dir, "finished", self.step, ExitCode.FINISHED)
        messages.say(f"Training finished at step {self.step}")

    def _fail(self, error: BaseException) -> None:
        self.metrics.flush()
        text = f"{type(error).__name__}: {error}"
        self._ledger.write("error", reason=text, step=self.step)
        messages.say(
            f"{text} (in step {self.step}). To go on from the last checkpoint:\n  {self._command}",
            logging.ERROR,
        )

    def _close_positions(self) -> None:
        for position in self._positions:
            if isinstance(position, Position):
                position.close()

    def _release(self) -> None:
        self._close_positions()
        try:
            self._saver.finish()
        finally:
            self._store.close()
            self._ledger.close()
            for callback in self.callbacks:
                stopping.remove_callback(callback)
            for scale in getattr(self, "_scales", ()):
                scale.remove()
            if self._leaving is None:
                stopping.hold_interrupts(False)
                if not self._was_installed:
                    stopping.uninstall()
