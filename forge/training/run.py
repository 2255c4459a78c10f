"""`forge.Run`: the object that a training loop uses.

Stops, saves and rollbacks happen only at step boundaries, so a checkpoint always holds the state
between two steps. One module, since it is the one class that every training script uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from forge.config import loading
from forge.config.schema import Policy
from forge.errors import ForgeError
from forge.jobdir import job_dir
from forge.process import sections
from forge.process.progress import Phase
from forge.shutdown import stopping
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState
from forge.training import misuse
from forge.training.attempt import Attempt
from forge.training.loop.evaluations import Evaluations
from forge.training.loop.loop_progress import LoopProgress, ResumableLoader
from forge.training.loop.steps import NESTED
from forge.training.metrics import checked_values
from forge.training.start import preflight

if TYPE_CHECKING:
    from forge.training.loop.plain import PlainLoops
    from forge.training.loop.pushed import Start

_Batch = TypeVar("_Batch")
_Other = TypeVar("_Other")
_Function = TypeVar("_Function", bound=Callable[[int], object])


class Run:
    """A training run that saves, stops and resumes by itself.

    Example::

        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step, batch in run.steps(1000, loader):
                loss = loss_fn(model, batch)
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)

    Entering the block locks the directory, checks the node and loads the newest good checkpoint.
    Leaving it without an error saves again if something has changed since the last save, and
    marks the training as finished.
    `run.state` is a dict for your own values, saved and restored with everything else.

    Args:
        policy: `cfg.resilience`, a mapping, a `forge.Policy`, or None for the defaults.
        name: Tells apart several Runs of one script (folds, seeds, stages). The checkpoints are
            in `<checkpoint.dir>/<name>`.
        config: The settings that identify the job: an argparse.Namespace, a dataclass, or a
            mapping. By default Hydra's config; without Hydra the command's arguments. A start with
            other values is refused with exit code 78, unless `resilience.resume=changed` is set.
        stateful: Objects to save, by name: anything with state_dict and load_state_dict, and
            `torch.Generator`. The random states of python, numpy, torch and every CUDA device
            are always saved.
    Raises:
        Exit: If the training cannot start, with a code of `forge.ExitCode`. The call of `forge.Run`
            exits with 78 if the policy or the name is invalid. The `with` statement exits with 78
            inside another Run, or if this process has already finished the training in the
            directory; with 73 if a running job owns the directory; with 69 if a health check
            fails; with 74 if no checkpoint is usable.
        StateMismatch: When the block is entered, if the checkpoint does not fit the objects.
    """

    def __init__(
        self,
        policy: Policy | Mapping[str, Any] | None = None,
        /,
        *,
        name: str | None = None,
        config: Any = None,
        **stateful: Any,
    ) -> None:
        with preflight.exits():  # a wrong argument ends the process with code 78
            misuse.check_given(stateful)
            self.policy: Policy = loading.load(policy)
            self.name = preflight.checked_name(name)
            self._config = preflight.checked_config(config)
            self._live = StateRegistry(stateful)
        self._evaluations = Evaluations()
        self.state = RunState()
        """A dict for your own values, which are saved and restored with everything else."""
        self._attempt: Attempt | PlainLoops | None = None
        """From entering the block on, and after it."""
        self._loops = LoopProgress()
        self._is_inside = False

    def _entered(self, call: str) -> Attempt | PlainLoops:
        if self._attempt is None or not self._is_inside:
            raise ForgeError(f"Run.{call}() needs `with forge.Run(...) as run:` around the loop")
        return self._attempt

    @property
    def step(self) -> int:
        """Number of steps done so far, including those of earlier attempts of the job."""
        return self._loops.step

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0.

        In a loop over `run.epochs` it is the number that the loop yields; in a loop over
        `run.steps` the number of passes that the loader has finished (0 without a loader).
        """
        return self._loops.epoch

    @property
    def batch(self) -> int:
        """Number of batches trained on in the current pass through the loader.

        The batch of the step that is running does not count; 0 at the start of each pass.
        """
        return self._loops.batch

    @property
    def resumed_from(self) -> str | None:
        """Name of the checkpoint that this attempt resumed from (`step_100`), or None."""
        return self._attempt.resumed_from if self._attempt is not None else None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop is pending, so that the run saves and exits at the end of this step."""
        return self._attempt is not None and self._attempt.is_stopping

    def __enter__(self) -> Run:
        if self.policy.enabled:
            given = (self.policy, self.name, self._config, self._live, self.state)
            self._attempt = Attempt(*given, self._evaluations)
        else:
            from forge.training.loop.plain import PlainLoops  # enabled Runs need none of it

            self._attempt = PlainLoops(self._live, self._evaluations)
        self._loops, self._is_inside = self._attempt.loops, True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_inside = False
        if self._attempt is not None:
            self._attempt.close(error)

    @overload
    def steps(self, n: int | None) -> Iterator[int]: ...
    @overload
    def steps(self, n: int | None, loader: Iterable[_Batch], /) -> Iterator[tuple[int, _Batch]]: ...
    @overload
    def steps(
        self, n: int | None, loader: Iterable[_Batch], other: Iterable[_Other], /
    ) -> Iterator[tuple[int, _Batch, _Other]]: ...
    @overload
    def steps(
        self,
        n: int | None,
        loader: Iterable[Any],
        other: Iterable[Any],
        third: Iterable[Any],
        /,
        *more: Iterable[Any],
    ) -> Iterator[Any]: ...
    def steps(self, n: int | None, *loaders: Iterable[Any]) -> Iterator[Any]:
        """Yield `(step, batch)`, or `step` without a loader, from the saved step up to `n`.

        New epochs of the loader begin automatically; forge calls `set_epoch` of its samplers with
        their number. A second loop continues to count where the
        first ended, so it needs a larger `n`; it can have another loader. Code between two loops
        runs again each time the job resumes, so put evaluations into `run.every`. A stop raises
        `Exit` between two steps; your `finally` blocks run.

        Args:
            n: Total number of steps, including those already done. None: until `break` or
                `run.finish`.
            loaders: A DataLoader, StatefulDataLoader, or any iterable of batches. With several
                loaders each step gets a batch of each, `(step, batch, other)`; a loader that
                ends starts a new pass.
        Returns:
            An iterator that ends after step `n - 1`; its `len` is `n`.
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`, inside a step of another loop, or if
                the `n` of a later loop is not larger than that of the loop before.
        """
        attempt = self._entered("steps")
        if n is not None:
            misuse.check_count("steps", n)
        number = math.inf if n is None else n
        first = loaders[0] if loaders else None
        for one in loaders[first is None :]:
            misuse.check_loader("steps", one)
        if self._loops.is_in_step:
            raise ForgeError(NESTED)
        others = [attempt.loader(one) for one in loaders[1:]]
        steps = attempt.steps(number, first)
        return SizedIterator(_joined(steps, others) if others else steps, lambda: _count(number))

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the saved one up to `n`; each has one pass of `run.batches`.

        Example::

            for epoch in run.epochs(cfg.epochs):
                for step, batch in run.batches(loader):
                    ...
                schedule.step(evaluate(model, data))

        After a stop or a kill, your code before or after the pass can run a second time for the
        same epoch. Saved objects are not changed twice, since forge restores them; other effects
        are repeated, such as a file that your code writes. A `break` out of this loop ends the loop
        for good: a later start does not continue it. A `break` out of `run.batches` ends the pass.

        Args:
            n: Total number of epochs, including those already done.
        Returns:
            An iterator that ends after epoch `n - 1`; its `len` is `n`.
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`, and after another loop of this Run.
        """
        attempt = self._entered("epochs")
        misuse.check_count("epochs", n)
        return SizedIterator(attempt.epochs(n), lambda: _count(n))

    def batches(self, loader: Iterable[_Batch]) -> Iterator[tuple[int, _Batch]]:
        """Yield `(step, batch)` for one pass through a loader.

        On resume the pass continues with the first batch that was not trained on. `step` counts
        over all epochs. A `break` ends the pass. forge does not call `set_epoch` of a sampler here:
        call it before the pass, as without forge.

        Args:
            loader: A DataLoader, StatefulDataLoader, or any iterable of batches. Each epoch can
                have a new loader.
        Returns:
            An iterator that ends when the loader ends, with the loader's `len` if it has one.
        Raises:
            ForgeError: Outside `for epoch in run.epochs(n):`, or twice in one epoch.
        """
        misuse.check_loader("batches", loader)
        pass_ = self._entered("batches").batches(loader)
        return SizedIterator(pass_, lambda: len(loader))  # type: ignore[arg-type]

    def open(self) -> Run:
        """Do what `with` does on entry, for code that cannot use a `with` block.

        Call `close` at the end.

        Returns:
            This Run.
        """
        return self.__enter__()

    def close(self, error: BaseException | None = None) -> None:
        """Do what the end of a `with` block does, after `open`.

        Args:
            error: The exception that ended the training; None if the training ended without one.
        """
        self.__exit__(None if error is None else type(error), error, None)

    def peek(self, name: str) -> Any:
        """Read the saved state of one object, for code that needs it before it can build the rest.

        Example::

            saved = forge.Run(policy).peek("trainer")
            epochs_done = 0 if saved is None else saved["epochs_done"]

        The Run need not be entered, and no object has to be given to it. Nothing is claimed or
        changed. The checkpoint is the newest that verifies, from which the job would resume.

        Args:
            name: The name under which the object is given to `forge.Run`.
        Returns:
            What its `state_dict` returned at the save; None if there is no checkpoint, or if the
            Run is disabled.
        Raises:
            CheckpointError: If no checkpoint is usable, or it has no object of this name.
        """
        if not self.policy.enabled:
            return None
        from forge.checkpoint import inspection  # a training itself loads in place

        directory = job_dir.current(self.policy.checkpoint.dir, self.name)[1]
        return inspection.state_of(name, directory, self.policy.checkpoint.verify)

    def begin(self) -> Start:
        """Begin a loop that forge does not own, such as a trainer's.

        Example::

            loader = forge.data.resumable(loader)
            with forge.Run(policy, model=model, trainer=trainer, loader=loader) as run:
                trainer.between_steps = lambda: run.boundary(trainer.step, taken=trainer.step)
                if not run.begin().is_finished:
                    trainer.fit(model, loader)

        Call it last before the loop: in a resumed job it restores all objects and random states
        again, and it installs forge's signal handlers again if a trainer has replaced them. If the
        NaN policy rolls back, the process exits with code 75, and the next attempt begins at the
        checkpoint to which the policy rolled back. For `taken` see `boundary`.

        Returns:
            A named tuple: `step` (steps done so far), `epoch` (as last given to `run.boundary`),
            `is_resumed`, and `is_finished` (the loop had ended: train nothing).
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`, after another loop of this Run, or
                with several objects of `forge.data.resumable`.
        """
        return self._entered("begin").begin()

    def boundary(self, step: int, *, epoch: int = 0, taken: int | None = None) -> bool:
        """End one step of a loop begun by `run.begin`; save or stop if that is due.

        Call it after everything that belongs to the step, the loop's own counters included:
        changes after the call are not in the checkpoint. A stop raises `Exit`.

        Args:
            step: Number of steps done, over all attempts; larger than in the call before.
            epoch: Number of the current epoch, if the loop has epochs. forge stores the number:
                `run.epoch` has it, and after a resume `run.begin().epoch`.
            taken: Number of batches trained on so far, over all attempts, as the loop itself
                counts them. Needed if `forge.Run` has a `forge.data.resumable`.
        Returns:
            Whether the loop should end now, because `run.finish` was called.
        Raises:
            ForgeError: Outside a loop begun by `run.begin`, or if `step` is not larger than in
                the call before.
            Exit: With code 78 if the loader has given the loop another number of batches than
                `taken`, for example because the loop reads ahead.
        """
        return self._entered("boundary").pass_boundary(step, epoch, taken)

    def end_loop(self, reason: str = "") -> None:
        """End the loop begun by `run.begin`, after its last step.

        The functions of `run.every` with `at_end=True` are called, and the state is saved. If no
        such loop is open, the call does nothing.

        Args:
            reason: The explanation that is shown and stored in the ledger.
        """
        if self._attempt is not None:
            self._attempt.end_loop(reason)

    def update(
        self,
        loss: torch.Tensor | float,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Any = None,
        *,
        scaler: Any = None,
        clip_norm: float | None = None,
    ) -> bool:
        """Update the parameters once: check for NaN, clip, step optimizer and schedule, zero_grad.

        If the loss or the gradients are bad, the NaN policy (`resilience.nan`) can skip the update:
        then neither the optimizer nor the schedule changes. The gradients are set to None, whether
        the update is done or skipped. The call synchronises the GPU with the host once.

        Args:
            loss: The loss on which `backward` was called (unscaled, if a scaler is used).
            optimizer: An optimizer given to `forge.Run`, or a list of them. The gradients of a
                list are checked and clipped together, and either all its optimizers step or none.
            schedule: A learning rate schedule given to `forge.Run`, stepped once; or a list.
            scaler: A `torch.amp.GradScaler` given to `forge.Run`. An overflow that the scaler
                handles does not count as a NaN. If several optimizers share a scaler, its scale is
                updated after the last of them.
            clip_norm: Largest L2 norm of the gradients. If all of them belong to one module, the
                result has the same bits as `clip_grad_norm_(module.parameters(), clip_norm)`.
        Returns:
            Whether the update was done.
        Raises:
            ForgeError: If one of the objects was not given to `forge.Run`, or outside a step.
        """
        if not self._loops.is_in_step:
            raise ForgeError(
                "run.update() was called outside a step, so it is not counted or saved: call it"
                " inside `for step, batch in run.steps(n, loader):`, or inside run.batches."
            )
        return self._entered("update").updater.update(loss, optimizer, schedule, scaler, clip_norm)

    def should_step(self, loss: torch.Tensor | float) -> bool:
        """Check the loss under the NaN policy, for loops that call `optimizer.step()` themselves.

        If the result is False, clear the gradients and do not step. Each call synchronises the GPU
        with the host once.

        Args:
            loss: The loss on which `backward` was called.
        Returns:
            Whether to step.
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`.
        """
        return self._entered("should_step").updater.should_step(loss)

    def log(self, **values: Any) -> None:
        """Record metrics of the current step in the job's ledger, without waiting for the GPU.

        Args:
            values: Numbers or one-element tensors, by name.
        Raises:
            TypeError: If a value is neither.
        """
        checked = checked_values(values)
        if self._attempt is not None:
            self._attempt.log(checked)

    def log_to(self, *loggers: Any) -> None:
        """Send what `run.log` records to loggers, each step once over all attempts of the job.

        Example::

            with forge.Run(policy, model=model, optimizer=optimizer) as run:
                run.log_to(forge.loggers.TensorBoard(), forge.loggers.WandB(project="lm"))

        Each logger works in a thread of its own. If a logger fails or hangs, training and saves
        continue, and the logger gets later what it has missed. A rehearsal has no loggers.

        Args:
            loggers: Objects of `forge.loggers`.
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`.
        """
        from forge.training import followers  # most Runs have no loggers

        followers.check_loggers(loggers)
        self._entered("log_to").log_to(loggers)

    def every(
        self, steps: int | None = None, *, at_end: bool = False, epochs: int | None = None
    ) -> Callable[[_Function], _Function]:
        """Call the decorated function between two steps, for example to evaluate or to export.

        Example::

            @run.every(cfg.eval_every, at_end=True)
            def held_out(step):
                run.log(held_out=evaluate(model, data, check_stop=run.check_stop))

        The function gets the number of steps done. Functions run in the order in which they were
        registered, and before a save of the same step. Metrics that they log belong to the last
        step done, so a checkpoint contains the metrics that were measured on its weights. If a
        stop arrives while a function runs, its next call of `run.check_stop` can interrupt it. The
        resumed job then runs all functions of that step again (with several ranks, even if none
        was interrupted).

        Args:
            steps: Call it after every `steps` steps; None: only as `at_end` and `epochs` say.
            at_end: Whether to call it at the end of each `run.steps` too (not after a `break`).
            epochs: Call it after every `epochs` passes of `run.batches`, before your code below
                that loop.
        Returns:
            A decorator that returns the function unchanged.
        Raises:
            ForgeError: If `steps` or `epochs` is not a positive number, if neither they nor
                `at_end` are given, or inside a step.
        """
        misuse.check_interval(steps)
        if self._loops.is_in_step:
            raise ForgeError(
                "run.every() was called inside a step, so each step would register its function"
                " again: move it above the loop."
            )

        def register(function: _Function) -> _Function:
            misuse.check_function("every", function)
            self._evaluations.add(function, steps, at_end=at_end, epochs=epochs)
            return function

        return register

    def check_stop(self) -> bool:
        """Allow a pending stop to interrupt a `run.every` function, by raising `Exit`.

        The checkpoint then has the state from before this step's functions ran: what they changed
        is discarded, and the resumed job runs all of them again. A stop waits for
        short functions and does not interrupt them: functions are short if all those of this step
        together took, the last time, less than ten times as long as forge needs to copy the state
        for a checkpoint. Code after a pass of `run.batches` can call
        `check_stop` too, but a stop interrupts it only in a job of one rank. Each call counts as
        progress for the hang detection. In a data worker, another thread or a child process the
        call does nothing.

        Returns:
            Always False; ignore it. Do not return early from the function because of a stop: the
            logged values would then differ from those of an uninterrupted run.
        Raises:
            ForgeError: If called anywhere but in a `run.every` function, after a pass of
                `run.batches`, or in `run.evaluating`.
        """
        self._entered("check_stop").check_stop()
        return False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Mark an evaluation inside a step, of a trainer that evaluates there.

        Example::

            with run.evaluating():
                for batch in loader:
                    run.check_stop()
                    ...

        The hang detection gives it its own time limit, and each call of `run.check_stop` counts as
        progress. A stop waits for the end of the step: in your own loop evaluate in a function of
        `run.every`, which a stop can interrupt.
        """
        evaluations, was_in_step = self._evaluations, self._evaluations.is_in_step
        evaluations.is_in_step = True
        try:
            with sections.current().inside(Phase.evaluation, "in a step"):
                yield
        finally:
            evaluations.is_in_step = was_in_step

    def save(self) -> None:
        """Save at the end of the current step. Outside a loop: save at once.

        In a loop a call on any one rank is enough. Outside a loop every rank has to call it.
        """
        if self._attempt is not None:
            self._attempt.save()

    def finish(self, reason: str) -> None:
        """End the loop after this step, before its `n` is reached: early stopping.

        Example::

            @run.every(500)
            def held_out(step):
                if patience.is_over(evaluate(model, data)):
                    run.finish("no better for 5 evaluations")

        If the job has several ranks, call it in a `run.every` function; a call on any one rank ends
        the loop on all of them. The current step is completed, and the `run.every` functions with
        `at_end=True` are called. The script then continues below the loop; later loops run as
        usual. A later start does not continue the loop, not even with a larger `n`.

        Args:
            reason: The explanation that is shown and stored in the ledger.
        Raises:
            ForgeError: Outside the loop, or inside a step if the job has several ranks.
        """
        if self._attempt is None:
            raise ForgeError(misuse.FINISH_OUTSIDE_A_LOOP)
        self._attempt.finish(reason)

    def on_stop(self, callback: Any, timeout_s: float = stopping.CALLBACK_TIMEOUT_S) -> Any:
        """Call `callback()` after the save when the run is stopped; see `forge.on_stop`.

        Args:
            callback: A function without arguments.
            timeout_s: Seconds after which the stop continues without the callback.
        Returns:
            The callback, so that `on_stop` works as a decorator.
        """
        misuse.check_function("on_stop", callback)
        if self._attempt is not None:
            self._attempt.on_stop(callback, timeout_s)
        return callback


class SizedIterator(Iterator[_Batch]):
    """The iterator of a loop with a `len`, which progress bars and meters read."""

    def __init__(self, iterator: Iterator[_Batch], size: Callable[[], int]) -> None:
        self._iterator = iterator
        self._size = size

    def __iter__(self) -> Iterator[_Batch]:
        return self._iterator

    def __next__(self) -> _Batch:
        return next(self._iterator)

    def __len__(self) -> int:
        return self._size()


def _count(n: float) -> int:
    if math.isinf(n):
        raise TypeError("a loop without a number of steps has no len")
    return int(n)


def _joined(steps: Iterator[Any], others: list[ResumableLoader[Any]]) -> Iterator[Any]:
    for step, batch in steps:
        yield (step, batch, *(next(one) for one in others))
