"""The life of an enabled `forge.Run`, from entering its `with` block to leaving it.

    claim     all ranks meet, rank 0 claims the directory, the others open it
    check     the node is healthy, the code and the ranks agree, the checkpoints are this job's
    resume    the newest good checkpoint is loaded
    ready     signals are received, loops can begin
    end       the state is saved, or the reason of the end; everything is released

One module, since entering, leaving and failing in between open and release the same objects.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge import messages
from forge.compat import of_torch
from forge.config.schema import NanAction, Policy, SignalAction
from forge.data import workers
from forge.errors import CheckpointError, ConfigError, Exit, ForgeError, RankLost
from forge.group.collectives import enter_group
from forge.group.group import MARGIN, START_S, Exchange
from forge.group.requests import Watcher
from forge.health import attempt
from forge.jobdir import job_dir
from forge.jobdir.job_files import RANK, REHEARSAL, SAVE_WITHIN, forge_dir
from forge.process import sections
from forge.process.time_limit import TimeLimit
from forge.shutdown import stopping
from forge.state import unregistered
from forge.state.initial_hyperparameters import InitialHyperparameters
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState
from forge.training import misuse
from forge.training.boundary import Boundary
from forge.training.decide import Halt
from forge.training.loop.evaluations import Evaluations
from forge.training.loop.loop_progress import LoopProgress, ResumableLoader
from forge.training.loop.steps import Steps
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater
from forge.training.optimizer_steps import OptimizerSteps
from forge.training.parts import Parts
from forge.training.shutdown import Shutdown
from forge.training.start import attempt_io, preflight
from forge.training.start.attempt_io import AttemptIO
from forge.training.start.checkpoint_owner import CheckpointOwner
from forge.training.train_state import TrainState
from forge.training.watchers import (
    HeartbeatWatcher,
    LedgerWatcher,
    StopWatcher,
    TimeWatcher,
    Watchers,
)

if TYPE_CHECKING:
    from forge.training.followers import Followers
    from forge.training.loop.epochs import Epochs
    from forge.training.loop.pushed import PushedLoop, Start
    from forge.training.rollback import RateScale

_LEAVE_S = 10.0
"""Seconds that ranks wait for each other when they exit."""

_LOST_S = 2.0
"""Seconds to wait, after a collective failed, for news that a rank has died."""

_RESUMABLE = "forge.data.pushed"
"""Module of the objects of `forge.data.resumable`; only scripts that use one load it."""

_active: list[Attempt] = []


def active() -> Attempt | None:
    """The attempt that is open in this process."""
    return _active[-1] if _active else None


class Attempt:
    """One attempt; when it is made, its loops can begin.

    Args:
        policy: The policy of the Run.
        name: The name of the Run.
        config: The settings that identify the job, by dotted keys; None: those of its command.
        live: The objects of the Run.
        own: `run.state`.
        evaluations: The functions of `run.every`.
    Raises:
        Exit: If the training cannot start.
        StateMismatch: If the checkpoint does not fit the objects.
    """

    def __init__(
        self,
        policy: Policy,
        name: str | None,
        config: dict[str, Any] | None,
        live: StateRegistry,
        own: RunState,
        evaluations: Evaluations,
    ) -> None:
        preflight.check_alone(is_inside=any(one._pid == os.getpid() for one in _active))
        self._pid: int = os.getpid()
        self._policy = policy
        self._name = name
        self._config = config
        self._live = live
        self._own = own
        self._evaluations = evaluations
        self.loops = LoopProgress(self._note)
        """The current step and loop."""
        self._nan = NanPolicy(policy.nan)
        self.updater = Updater(live, self._nan, self._note)
        self._optimizer_steps = OptimizerSteps(live, self.loops, self.updater)
        self._scales: list[RateScale] = []
        self._callbacks: list[Any] = []
        self._followers: Followers | None = None
        """The threads of loggers, if there are any."""
        self.resumed_from: str | None = None
        step, listen = lambda: self.loops.step, of_torch.on_compilation
        sections.begin(policy.hang, os.environ, step, listen)
        try:
            built = self._check_objects()
            job, checkpoint_dir = self._claim()
            try:
                owner = self._check(job, checkpoint_dir, built)
                self._resume(owner)
                self._make_ready()
            except BaseException:
                try:
                    self._release(is_together=True)  # what is wrong here, every rank finds
                finally:
                    self._forget(is_leaving=False)
                raise
        except BaseException:
            sections.end()  # the script can catch the error and continue
            raise
        _active.append(self)

    # -- claim, check, resume, ready -----------------------------------------------------------

    def _check_objects(self) -> InitialHyperparameters:
        """Name objects that cannot be saved now, not at the first save hours later."""
        with preflight.exits():
            states = self._live.read_states()
            built = InitialHyperparameters(self._live.objects)
            try:
                self._live.check_savable(states)
            except CheckpointError as error:  # of the script, and of no checkpoint yet
                raise ConfigError([str(error)], "The call of forge.Run") from error
        return built

    def _claim(self) -> tuple[Path, Path]:
        """Meet the other ranks, and claim the directories of the job and of its checkpoints."""
        self._was_installed = stopping.is_installed()
        with preflight.exits():
            self._group = enter_group(self._secret_folder)
        exchange = Exchange(self._group, "start", START_S)
        entered = "this forge.Run (every rank has to enter it)"
        try:
            with preflight.exits():
                job, checkpoint_dir = map(Path, exchange.broadcast(entered, self._directories))
            with preflight.exits():
                if self._group.size > 1:
                    from forge.training.start import agreement

                    agreement.check(exchange, self._policy, self._name, self._config)
                self._directory = self._open(exchange, job, checkpoint_dir)
        except BaseException:
            self._group.close(_LEAVE_S)
            raise
        self._exchange = exchange
        context = attempt.here(
            self._policy.health,
            job,
            checkpoint_dir,
            self._group,
            self._live_bytes,
            self._policy.hang.start_s,
        )
        note = self._directory.ledger.write
        self._health: attempt.Health = attempt.Health(
            self._policy.health, context, note, stopping.is_stopping
        )
        return job, checkpoint_dir

    def _directories(self) -> list[str]:
        """The directories of the job and of its checkpoints, as rank 0 sees them."""
        return [str(one) for one in job_dir.current(self._policy.checkpoint.dir, self._name)]

    def _secret_folder(self) -> Path:
        """The folder for the ranks' shared secret, on rank 0, before anything is claimed."""
        job, checkpoint_dir = map(Path, self._directories())
        with preflight.exits():
            attempt_io.check_directory(self._policy, checkpoint_dir)
        return forge_dir(job)

    def _open(self, exchange: Exchange, job: Path, checkpoint_dir: Path) -> AttemptIO:
        """Rank 0 claims the directory; then the other ranks open it."""
        group, opened = self._group, list[AttemptIO]()
        if group.size > 1:
            os.environ[RANK] = str(group.rank)  # names the files of this rank

        def opening() -> None:
            opened.append(
                AttemptIO(self._policy, self._name, self._nan, job, checkpoint_dir, group)
            )

        exchange.broadcast("the claim", opening)
        exchange.all_gather("the directories", opening if group.rank else lambda: None)
        return opened[0]

    def _check(
        self, job: Path, checkpoint_dir: Path, built: InitialHyperparameters
    ) -> CheckpointOwner:
        """Check the node, the code and the owner of the checkpoints; from now on signals wait."""
        policy, group, health = self._policy, self._group, self._health
        self._handler = handler = stopping.install(policy, forge_dir(job))
        workers.shield_forked(lambda: handler.is_of_parent)
        # gloo can leave a rank inside a collective though all other ranks are gone.
        group.when_lost(self._handler.begin_deadline)
        self._heed_torchrun()
        stopping.hold_interrupts(is_held=True)
        with preflight.exits():
            owner = CheckpointOwner(
                checkpoint_dir,
                job,
                name=self._name or "",
                built=built,
                is_change_wanted=preflight.is_change_wanted(policy),
                config=self._config,
            )
            if group.size > 2:  # the sum of two gradients has only one order
                from forge.state import ddp_buckets

                ddp_buckets.check(self._live.objects, group.size)
            self._exchange.broadcast("the checkpoints", self._directory.check_not_lost)
            preflight.check_code(job, policy.requeue.on_code_change)
            gather, limit_s = self._exchange.all_gather, START_S + health.limit_s
            gather("the health checks", health.check_node, within_s=limit_s)
            gather("the ranks' health checks", health.check_ranks, within_s=limit_s)
        return owner

    def _heed_torchrun(self) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        from forge.group import torchrun

        torchrun.stop_with_agent()
        actions = self._policy.signal.actions.items()
        signals = [name for name, action in actions if action is not SignalAction.ignore]
        advice = torchrun.advice(os.environ, signals, self._policy.stop_s)
        if advice and self._group.rank == 0:
            messages.warn(advice)

    @property
    def _live_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._live.local_parameters())

    @property
    def _stop_s(self) -> float:
        return self._policy.stop_s or self._policy.signal.warning_s

    def _resume(self, owner: CheckpointOwner) -> None:
        """Load the newest checkpoint that verifies, if there is one."""
        directory, loops = self._directory, self.loops
        self._train_state = TrainState(self._live, self._own, loops, self.updater, owner, directory)
        with preflight.exits():
            found = self._train_state.resume()
            if found is not None:
                loops.is_complete = found.manifest.is_complete
                self.resumed_from = found.path.name
            if self._group.rank == 0:  # the other ranks have already read the file this replaces
                owner.keep(directory.ledger)
            directory.record_start(
                loops.step,
                self.resumed_from,
                owner.id,
                objects="" if found is not None else self._train_state.digest(),
                is_complete=loops.is_complete,
            )
            preflight.keep_threads(directory.job, is_resumed=found is not None)

    def _make_ready(self) -> None:
        """Receive signals, and build what a loop needs."""
        policy, group, handler, directory = (
            self._policy,
            self._group,
            self._handler,
            self._directory,
        )
        num_steps = 1 if group.size == 1 else 2 + MARGIN
        folder = forge_dir(directory.job)
        limit = TimeLimit(os.environ, self._stop_s, folder=folder, num_steps=num_steps)
        announcement = signal.Signals[f"SIG{policy.signal.name}"]
        due_s = min(self._stop_s, policy.signal.warning_s)
        within_s = float(os.environ.get(SAVE_WITHIN) or math.inf)
        directory.saver.expect(self._live_bytes, within_s)
        self._stops = stops = StopWatcher(handler, limit, directory.saver, self._nan)
        watchers = Watchers(self._watchers())
        self._shutdown = Shutdown(self.loops, directory, handler, limit, watchers)
        handler.interrupt_with(
            None,
            pass_over=lambda number: number == announcement and limit.is_too_soon(due_s),
            held_up_by=self._shutdown.held_up_by,
        )
        self._parts = parts = Parts(
            policy=policy,
            group=group,
            exchange=Exchange(group, "boundaries"),
            loops=self.loops,
            train_state=self._train_state,
            directory=directory,
            saver=directory.saver,
            nan=self._nan,
            updater=self.updater,
            evaluations=self._evaluations,
            handler=handler,
            stops=stops,
            shutdown=self._shutdown,
            watchers=watchers,
        )
        self.boundary = Boundary(parts)
        self._steps = Steps(parts, self.boundary)
        self._epochs: Epochs | None = None
        self._pushed: PushedLoop | None = None
        if policy.nan.action is NanAction.rollback or self._nan.lr_scale != 1:
            from forge.training.rollback import RateScale  # few trainings need it

            self._scales = [RateScale(self._nan, one) for one in self._live.optimizers]
        self._optimizer_steps.enter_run(self._shutdown.giving_up)

    def _watchers(self) -> list[Watcher]:
        """The watchers of the loops; a rehearsal has two more."""
        directory = self._directory
        found: list[Watcher] = [
            self._stops,
            self._train_state,
            directory.saver,
            LedgerWatcher(directory.ledger, self.loops),
            TimeWatcher(directory.ledger, self.loops.step),
            directory.metrics,
            self.updater,
            HeartbeatWatcher(),
        ]
        if REHEARSAL in os.environ:
            from forge.training.loop import fault_injection, trace_recorder

            if trace_recorder.VARIABLE in os.environ:
                own = directory.checkpoint_dir.name, self.loops, self._train_state
                found.append(trace_recorder.TraceRecorder(*own, self._group.rank))
            found.append(fault_injection.FaultInjector(directory.ledger))
        return found

    def _note(self, kind: str, **values: Any) -> None:
        """Write to the ledger, with the current batch of this rank."""
        at = {"epoch": self.loops.epoch, "batch": self.loops.batch}
        self._directory.ledger.write(kind, **values, **at)

    # -- the loops -----------------------------------------------------------------------------

    def _begin_loop(self) -> None:
        """Check the given objects, now that the script has built everything."""
        self.boundary.check_left()
        self._own.begin_loop()
        stopping.warn_of_children()
        for one in self._live.given.values():
            if type(one).__module__ == _RESUMABLE:
                self.loops.watch(one.loader)
        with preflight.exits():
            self._train_state.check_own()
            problems = [] if self.loops.positions else unregistered.problems(self._live.given)
            if problems:
                raise ConfigError(problems, "The call of forge.Run")

    def steps(self, n: float, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        self._begin_loop()
        return self._steps.iterate(n, loader)

    def epochs(self, count: int) -> Iterator[int]:
        """See `Run.epochs`."""
        self._begin_loop()
        if self._epochs is None:
            from forge.training.loop.epochs import Epochs

            self._epochs = Epochs(self._parts, self._own, self.boundary, self._steps)
        return self._epochs.iterate(count)

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """See `Run.batches`."""
        if self._epochs is None:
            raise ForgeError(misuse.BATCHES_WITHOUT_EPOCH)
        return self._epochs.batches(loader)

    def begin(self) -> Start:
        """See `Run.begin`."""
        self._begin_loop()
        if self._pushed is None:
            from forge.training.loop.pushed import PushedLoop

            self._pushed = PushedLoop(self._parts, self.boundary, self._live.given)
        return self._pushed.begin()

    def pass_boundary(self, step: int, epoch: int, taken: int | None) -> bool:
        """See `Run.boundary`."""
        if self._pushed is None:
            misuse.check_boundary(step, self.loops.step, is_open=False)
        assert self._pushed is not None
        return self._pushed.boundary(step, epoch, taken)

    def end_loop(self, reason: str) -> None:
        """See `Run.end_loop`."""
        if self._pushed is not None:
            self._pushed.end(reason)

    def loader(self, loader: Iterable[Any]) -> ResumableLoader[Any]:
        """A loader of `run.steps` after the first; see `Run.steps`."""
        with self._shutdown.giving_up():
            return self.loops.loaders.add(self.loops.open_loader(loader))

    # -- calls between two steps ---------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """See `Run.is_stopping`."""
        return self._stops.is_stopping

    def log(self, values: dict[str, Any]) -> None:
        """See `Run.log`."""
        self._directory.metrics.log(values)

    def save(self) -> None:
        """See `Run.save`."""
        self.boundary.save()

    def finish(self, reason: str) -> None:
        """See `Run.finish`."""
        self.boundary.finish(reason)

    def log_to(self, loggers: Iterable[Any]) -> None:
        """See `Run.log_to`."""
        if self._group.rank or REHEARSAL in os.environ:
            return
        from forge.training.followers import Followers

        if self._followers is None:
            self._followers = Followers(self._directory, self._policy, self._name)
        followers, wait_s = self._followers, stopping.CALLBACK_TIMEOUT_S
        for logger in loggers:
            followers.add(logger)
        self.on_stop(lambda: followers.close(wait_s), wait_s + 1)

    def check_stop(self) -> None:
        """See `Run.check_stop`."""
        if self._evaluations.may_poll(self._pid):
            self.boundary.check_stop()

    def on_stop(self, callback: Any, timeout_s: float) -> None:
        """See `Run.on_stop`."""
        self._callbacks.append(callback)
        stopping.on_stop(callback, timeout_s)

    # -- end -----------------------------------------------------------------------------------

    def close(self, error: BaseException | None) -> None:
        """Leave the `with` block, with or without an error."""
        if os.getpid() != self._pid:
            return  # a child that was forked inside the block
        with self.loops.not_between():
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            self.boundary.forget_held()  # the error can be from the middle of the pass
        lost = self._group.lost(_LOST_S) if isinstance(error, RuntimeError) else ""
        try:
            if error is not self._shutdown.exit:
                self._shutdown.raise_again()
            if error is None:
                self._finish()
            elif self._handler.explains(error):
                self._shutdown.stop(self._stops.stop_request(), save=None)
            elif lost:
                first = str(error).partition("\n")[0]
                self._shutdown.give_up(
                    RankLost(f"{lost}; on this rank, {type(error).__name__}: {first}")
                )
            elif not isinstance(error, Exit):
                self._directory.record_error(f"{type(error).__name__}: {error}", self.loops.step)
        finally:
            is_leaving = self._shutdown.exit is not None
            try:
                self._release(is_together=is_leaving or error is None)
            finally:
                self._shutdown.act_last(error)
                self._forget(is_leaving=is_leaving, is_finished=error is None)

    def _finish(self) -> None:
        """The `with` block ended without an error: mark the training as finished."""
        loops, directory = self.loops, self._directory
        self._steps.close()
        if self._epochs is not None:
            self._epochs.close()
        self.end_loop("")
        if isinstance(self._nan.wants, Halt):
            self._shutdown.halt(self._nan.wants)
        if missing := loops.missing:
            self._shutdown.give_up(ConfigError([missing], "This Run"))
        directory.metrics.flush()
        request = self.boundary.finish_run()
        if request is not None:
            self._shutdown.stop(request, save=None)
        directory.record_finish(loops.step, loops.finished_by)
        # A resumed job can have only an evaluation left.
        is_whole = self.resumed_from is None and self._group.rank == 0
        if is_whole and self._optimizer_steps.is_nothing_updated():
            messages.warn(
                f"Nothing was updated in {loops.step} steps: no optimizer has stepped, unless in a"
                " CUDA graph. Write `loss.backward()` and `run.update(loss, optimizer)` in the"
                " loop. If the loop is an evaluation, leave the optimizer out of forge.Run(…)"
            )

    def _release(self, *, is_together: bool = False) -> None:
        if self in _active:
            _active.remove(self)
        self.loops.close()
        self._health.close()
        if not is_together:  # the other ranks are notified; do not wait for a common save
            self._group.close(0)
        self._directory.release()
        self._group.close(_LEAVE_S)
        if self._followers is not None:
            self._followers.close()

    def _forget(self, *, is_leaving: bool, is_finished: bool = False) -> None:
        self._optimizer_steps.close()
        for callback in self._callbacks:
            stopping.remove_callback(callback)
        for scale in self._scales:
            scale.remove()
        sections.end()
        if not is_leaving:
            stopping.hold_interrupts(is_held=False)
            if is_finished:
                stopping.leave_if_asked()  # by a signal that came while the Run was released
            if not self._was_installed:
                stopping.uninstall()
