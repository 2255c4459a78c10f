"""`forge.Run`: the part of forge that stands in the user's loop.

    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for step, batch in run.steps(1000, loader):
            loss = loss_fn(model, batch)
            loss.backward()
            run.update(loss, optimizer)

Entering claims the directory, checks the node and loads the newest good checkpoint. Every step
boundary is where a stop, a save or a rollback happens, so that what is saved is always the state
between two steps. Leaving without an error saves what followed the last loop, and marks the job as
finished.

One module, since it is one class: what its methods do is in the modules beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload

import torch

from forge.config.schema import Policy
from forge.errors import Exit, ForgeError
from forge.shutdown import stopping
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState
from forge.training import misuse
from forge.training.loop.evaluations import Evaluations
from forge.training.loop.loops import Loops
from forge.training.loop.plain import PlainLoops
from forge.training.loop.resumable_loader import ResumableLoader
from forge.training.loop.steps import NESTED
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater
from forge.training.session import Session
from forge.training.start import preflight

_Batch = TypeVar("_Batch")
_Other = TypeVar("_Other")
_Function = TypeVar("_Function", bound=Callable[[int], object])


class Run:
    """One attempt at a training job: it resumes, runs the loop, saves at a stop, and exits.

    Example::

        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step, batch in run.steps(1000, loader):
                loss = loss_fn(model, batch)
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)

    Args:
        policy: `cfg.resilience`, a mapping, a `forge.Policy`, or None for the defaults.
        unnamed: Nothing: every object has a name, as in `forge.Run(policy, model=model)`.
        name: What tells this Run from the others of a script that has several, one after the
            other (folds, seeds, stages): its checkpoints lie in `<checkpoint.dir>/<name>`.
        config: The settings that make this job another job: an argparse.Namespace, a dataclass, or
            a mapping. A start with other values is rejected (78) instead of resuming. By default
            Hydra's config; without Hydra the arguments of the command.
        stateful: Objects with state_dict and load_state_dict, and instances of `torch.Generator`,
            by name. Random states of python, numpy, torch and every CUDA device are always saved.
    Raises:
        Exit: With code 78 for a bad policy or name; on entering 78 inside another Run, and where
            this process has finished the training in the directory, 73 where a running job owns
            the directory, 69 for a failed health check, 74 where no checkpoint can be used.
        StateMismatch: On entering, where the checkpoint does not fit the objects.
    """

    @misuse.hide_unnamed
    def __init__(
        self,
        policy: Policy | Mapping[str, Any] | None = None,
        /,
        *unnamed: NoReturn,
        name: str | None = None,
        config: Any = None,
        **stateful: Any,
    ) -> None:
        preflight.check_call(policy, unnamed, stateful)
        self.policy: Policy = preflight.checked_policy(policy)
        self.name = preflight.checked_name(name)
        self._config = preflight.checked_config(config)
        self._live = StateRegistry(stateful)
        self._nan = NanPolicy(self.policy.nan)
        self._updater = Updater(self._live, self._nan, is_enabled=self.policy.enabled)
        self._evaluations = Evaluations()
        self.state = RunState()
        """Values of the user's own that are saved and restored with everything else."""
        self._session: Session | None = None
        self._is_inside = False
        self._plain = PlainLoops(self._updater, self._evaluations)

    @property
    def _inner(self) -> Session | PlainLoops:
        return self._session if self._session is not None else self._plain

    @property
    def _loops(self) -> Loops | PlainLoops:
        return self._session.loops if self._session is not None else self._plain

    @property
    def step(self) -> int:
        """Steps done."""
        return self._loops.step

    @property
    def epoch(self) -> int:
        """The epoch of `epochs`, else of the loader that is being read; 0 without one."""
        return self._loops.epoch

    @property
    def batch(self) -> int:
        """Batches of this pass through the loader that were done."""
        return self._loops.batch

    @property
    def resumed_from(self) -> str | None:
        """Name of the checkpoint this attempt began with, or None."""
        return self._session.resumed_from if self._session is not None else None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop is due, which comes at the end of the step; cheap to ask."""
        return self._session is not None and self._session.boundary.is_stopping

    def __enter__(self) -> Run:
        self._is_inside = True
        if self.policy.enabled:
            self._session = Session(
                self.policy,
                self.name,
                self._config,
                self._live,
                self._nan,
                self._updater,
                self._evaluations,
                self.state,
            )
            self._session.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_inside = False
        if self._session is not None:
            self._session.close(error)

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

        Epochs begin by themselves. A second call keeps counting where the first ended, with
        its own loader and a larger `n`; what stands between two calls runs again at every
        resume, so give evaluations to `run.every`. A stop leaves between two steps, through
        `Exit`, which only `finally` blocks see.

        Args:
            n: Steps in total, not those still to do; None: until a `break` or `run.finish`.
            loaders: A DataLoader, StatefulDataLoader, or any iterable of batches. Of several each
                gives its batch, `(step, batch, other)`, and begins again when it ends.
        Returns:
            An iterator that ends after step `n - 1`.
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`; inside a step of another loop; and
                for a second loop that would train nothing.
        """
        if not self._is_inside:
            raise ForgeError("Run.steps() needs `with forge.Run(...) as run:` around the loop")
        if n is not None:
            misuse.check_count("steps", n, loaders)
        number = math.inf if n is None else n
        first = loaders[0] if loaders else None
        for one in loaders[first is None :]:
            misuse.check_loader("steps", one)
        if self._loops.is_in_step:
            raise ForgeError(NESTED)
        others = [self.loader(one) for one in loaders[1:]]
        steps = self._inner.steps(number, first)
        return _joined(steps, others) if others else steps

    def loader(self, loader: Iterable[_Batch]) -> ResumableLoader[_Batch]:
        """A second source of batches, whose place is saved with everything else.

        Example::

            unlabelled = run.loader(other)
            for step, (x, y) in run.steps(n, loader):
                z = next(unlabelled)

        It begins again when it ends. Make it above the loop.

        Args:
            loader: A DataLoader, StatefulDataLoader, or any iterable of batches.
        Returns:
            An iterator without end.
        Raises:
            ForgeError: Inside a loop.
        """
        if self._loops.is_in_step or self._loops.is_in_epochs:
            raise ForgeError(
                "run.loader() was called inside the loop, which would make one more each time: move"
                " it above the loop."
            )
        misuse.check_loader("loader", loader)
        return self._inner.loader(loader)

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the saved one up to `n`, each for one pass of `batches`.

        Example::

            for epoch in run.epochs(cfg.epochs):
                for step, batch in run.batches(loader):
                    ...
                schedule.step(evaluate(model, data))

        What stands before and after the pass counts once for each epoch, and may run again after
        a stop or a kill. A `break` ends the training.

        Args:
            n: Epochs in total, not those still to do.
        Returns:
            An iterator that ends after epoch `n - 1`.
        Raises:
            ForgeError: Outside `with forge.Run(...) as run:`, and after another loop of this Run.
        """
        if not self._is_inside:
            raise ForgeError("Run.epochs() needs `with forge.Run(...) as run:` around the loop")
        misuse.check_count("epochs", n)
        return self._inner.epochs(n)

    def batches(self, loader: Iterable[_Batch]) -> Iterator[tuple[int, _Batch]]:
        """Yield `(step, batch)` for one pass through a loader, from the saved place.

        `step` counts over all epochs. A `break` ends the pass.

        Args:
            loader: A DataLoader, StatefulDataLoader, or any iterable of batches; it may be a new
                one in each epoch.
        Returns:
            An iterator that ends with the loader.
        Raises:
            ForgeError: Outside `for epoch in run.epochs(n):`, and a second time in one epoch.
        """
        misuse.check_loader("batches", loader)
        return self._inner.batches(loader)

    def update(
        self,
        loss: torch.Tensor | float,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Any = None,
        *,
        scaler: Any = None,
        clip_norm: float | None = None,
    ) -> bool:
        """The whole update under the NaN policy: check, clip, step, schedule, zero_grad.

        One host synchronisation a step, none per parameter. A skipped update moves neither the
        optimizer nor the schedule. Gradients are set to None afterwards.

        Args:
            loss: The loss that `backward` was called on (unscaled, where a scaler is used).
            optimizer: One that was given to `forge.Run`; or a list of them, for one update under
                one check: their gradients are clipped together, and all step or none.
            schedule: A learning rate schedule given to `forge.Run`, stepped once; or a list.
            scaler: A `torch.amp.GradScaler` given to `forge.Run`; overflows of its own are no NaNs.
                One that several optimizers share moves its scale when all gradients are used.
            clip_norm: Largest L2 norm of the gradients, as in `clip_grad_norm_`.
        Returns:
            Whether the update was done.
        Raises:
            ForgeError: Where one of the objects was not given to `forge.Run`, and outside a step.
        """
        if not self._loops.is_in_step:
            raise ForgeError(
                "run.update() was called outside a step, where nothing is counted or saved: call it"
                " inside `for step, batch in run.steps(n, loader):`, or inside run.batches."
            )
        misuse.check_loss("update", loss)
        return self._updater.update(loss, optimizer, schedule, scaler, clip_norm)

    def should_step(self, loss: torch.Tensor | float) -> bool:
        """Whether the update may be done, for loops that do it themselves.

        One host synchronisation. Where it returns False, clear the gradients and do not step.

        Args:
            loss: The loss that `backward` was called on.
        Returns:
            Whether to step.
        """
        misuse.check_loss("should_step", loss)
        return self._updater.should_step(loss)

    @misuse.hide_unnamed
    def log(self, *unnamed: NoReturn, **values: Any) -> None:
        """Record metrics under the current step; no host synchronisation.

        Args:
            unnamed: Nothing: every value has a name, as in `run.log(loss=loss)`.
            values: Numbers or one-element tensors, by name.
        Raises:
            ForgeError: If a value has no name, or is too large for a float.
        """
        misuse.refuse_unnamed_metrics(unnamed)
        if self._session is not None:
            self._session.metrics.log(values)

    def every(
        self, steps: int | None = None, *, at_end: bool = False, epochs: int | None = None
    ) -> Callable[[_Function], _Function]:
        """Call the decorated function between two steps: to evaluate, to sample, to export.

        Example::

            @run.every(cfg.eval_every, at_end=True)
            def held_out(step):
                run.log(held_out=evaluate(model, data, check_stop=run.check_stop))

        Functions run in the order in which they were registered, before a save that is due at the
        same time, with the number of steps done. What they log counts for the last step done, so
        that a checkpoint carries the metrics of its own weights. A stop that comes meanwhile waits
        for no evaluation that calls `run.check_stop`. A resumed job runs all functions of that
        boundary again.

        Args:
            steps: Call it each time this many more steps are done; None: never.
            at_end: Whether to call it at the end of each `run.steps`, too (not after a `break`).
            epochs: Call it after each so many passes of `run.batches`, before what follows them.
        Returns:
            The decorator, which returns the function as it is.
        Raises:
            ForgeError: Where `steps` is not a positive number, and inside a step.
        """
        misuse.check_interval(steps)
        if self._session is not None and self._session.loops.is_in_step:
            raise ForgeError(
                "run.every() was called inside a step, so each step would register its function"
                " once more: move it above the loop."
            )

        def register(function: _Function) -> _Function:
            misuse.check_function("every", function, 1)
            self._evaluations.add(function, steps, at_end=at_end, epochs=epochs)
            return function

        return register

    def check_stop(self) -> bool:
        """Let a stop happen inside a function of `run.every`; leaves through `Exit`.

        What is saved then is the state before the functions of this boundary, whatever they have
        done to it; the job that resumes runs them again. Where the last run was shorter than ten
        copies of the state, a stop waits for the function's end instead. In a worker, another
        thread or a child process nothing happens. Each call is progress to who looks for hangs.

        Returns:
            False: a function that cut itself short would log what no undisturbed run logs.
        Raises:
            ForgeError: Outside such a function.
        """
        if self._evaluations.may_poll() and self._session is not None:
            self._session.boundary.check_stop()
        return False

    def save(self, *, pin: bool = False) -> None:
        """Save at the next step boundary (at once where no step is under way).

        Of several ranks one is enough in a step; outside a loop every rank has to call it.

        Args:
            pin: Keep this checkpoint permanently, as `forge pin` does.
        """
        if self._session is not None:
            self._session.boundary.request_save(pin=pin)

    def finish(self, reason: str) -> None:
        """End the loop at this boundary, as its `n` would: early stopping.

        Example::

            @run.every(500)
            def held_out(step):
                if patience.is_over(evaluate(model, data)):
                    run.finish("no better for 5 evaluations")

        The current step is completed, and functions of `run.every` that are due at the end run.
        The job finishes, with exit code 0, unless more loops follow; a later start does not train
        the loop again, not even with a larger `n`.

        Args:
            reason: Why, for people; it is kept in the ledger and the verdict.
        Raises:
            ForgeError: Outside a step and a function of `run.every`.
        """
        if self._session is not None:
            self._session.boundary.finish(reason)
        self._plain.is_finished = True

    def on_stop(self, callback: Any, timeout_s: float = stopping.CALLBACK_TIMEOUT_S) -> Any:
        """Call `callback()` when the run is stopped, after the save; see `forge.on_stop`.

        Args:
            callback: A function without arguments.
            timeout_s: Seconds after which the stop continues without it.
        Returns:
            The callback, so that this can be used as a decorator.
        """
        misuse.check_function("on_stop", callback, 0)
        if self._session is not None:
            self._session.callbacks.append(callback)
            return stopping.on_stop(callback, timeout_s)
        return callback


def _joined(steps: Iterator[Any], others: list[ResumableLoader[Any]]) -> Iterator[Any]:
    for step, batch in steps:
        yield (step, batch, *(next(one) for one in others))


__all__ = ["Exit", "Run"]
