"""`ForgeCallback`: the hooks by which a Trainer runs under `forge.Run`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

import forge
from forge import messages
from forge.compat import of_lightning, of_torch
from forge.integrations.lightning import unsupported
from forge.integrations.lightning.loader import DrivenLoader
from forge.integrations.lightning.package import pytorch
from forge.integrations.lightning.place import Place
from forge.integrations.lightning.state import TrainerState
from forge.integrations.refusal import refuse


class ForgeCallback(pytorch.Callback):
    """Stops, saves and resumes `Trainer.fit` between two batches, as `forge.Run` does a loop.

    Example::

        resume = ForgeCallback(cfg.resilience)
        trainer = Trainer(max_epochs=3, callbacks=[resume])
        trainer.fit(module, resume.loader(train_loader), val_loader)

    Model, optimizers, schedules, the Trainer's counters, the sums of `self.log(on_epoch=True)`,
    metrics of torchmetrics, callbacks, random states and the place in the data are saved.

    Args:
        policy: As for `forge.Run`.
        name: As for `forge.Run`, if a script calls `fit` several times.
        config: As for `forge.Run`.
    """

    def __init__(
        self,
        policy: forge.Policy | Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        config: Any = None,
    ) -> None:
        self._policy, self._name, self._config = policy, name, config
        self.run: forge.Run | None = None
        """The Run of the current call of `fit`; None outside of it."""
        self._trainer: Any = None
        self._evaluation = ExitStack()

    def loader(self, loader: Any) -> DrivenLoader:
        """The training data, to be given to `fit` or returned from `train_dataloader`.

        Args:
            loader: A DataLoader, a collection of loaders, or a CombinedLoader.
        """
        return DrivenLoader(self, loader)

    # -- the beginning -----------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is built, and the loops have not begun: claim the directory, and resume."""
        if problems := unsupported.problems(trainer):
            refuse("This Trainer", problems)
        for sentence in unsupported.remarks(trainer):
            messages.warn(f"Not known to resume exactly: {sentence}")
        switched_off = " and ".join(of_lightning.leave_signals(trainer))
        if trainer.is_global_zero:
            messages.say(f"Switched off, since forge acts on signals: Lightning's {switched_off}")
        self._trainer, self._has_begun, self._is_wrapped = trainer, False, False
        self._state, self._place = TrainerState(trainer, self), Place()
        if "FORGE_REHEARSAL" in os.environ:
            self._state.move_files(os.environ["FORGE_REHEARSAL"])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.run = forge.Run(
            self._policy,
            name=self._name,
            config=self._config,
            model=trainer.model,
            optimizers=list(trainer.optimizers),
            schedules=[one.scheduler for one in trainer.lr_scheduler_configs],
            trainer=self._state,
            data=self._place,
            **({} if scaler is None else {"scaler": scaler}),
        ).open()
        if self._is_resumed:
            trainer.num_sanity_val_steps = 0

    @property
    def _is_resumed(self) -> bool:
        return self._state.saved is not None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has set up the training data."""
        if not self._is_wrapped:
            refuse("This Trainer", [unsupported.NOT_WRAPPED])

    # -- the steps ---------------------------------------------------------------------------------

    @property
    def drives(self) -> bool:
        """Whether the training loop of a Run reads a loader now, not a validation or a tuner."""
        return self.run is not None and self._trainer.training

    def begin_pass(self, loader: DrivenLoader) -> None:
        """Begin a pass, or continue that of the checkpoint, as the Trainer makes an iterator."""
        is_first, self._is_new, self._is_wrapped = not self._is_wrapped, True, True
        if self._is_resumed and not self._has_begun:
            self._place.open(loader)
            if is_first:  # Lightning has loaded those of `ckpt_path`
                self._state.restore_counters()
        else:
            self._place.begin_pass(loader, self._trainer.current_epoch)
            self._before = self._place.taken - of_lightning.num_ready(self._trainer)

    def next_batch(self, loader: DrivenLoader) -> Any:
        """The next batch of the training; ends the step before, if there is one."""
        is_new, self._is_new = self._is_new, False
        if loader.ahead and is_new:  # fetched before the training loop asks for a batch
            if self._is_resumed and not self._has_begun:
                self._place.continue_pass(loader)
        elif self._has_begun:
            self._end_step(loader)
        else:
            self._begin(loader)
        return self._place.take()

    def _begin(self, loader: DrivenLoader) -> None:
        """Begin the loop: the Trainer does nothing more before its first step."""
        assert self.run is not None
        start, trainer = self.run.begin(), self._trainer
        if start.is_finished or self._state.is_over:
            refuse("This Trainer", [unsupported.FINISHED.format(step=start.step)])
        self._has_begun = True
        self._before = self._place.taken - loader.ahead - of_lightning.num_ready(trainer)
        self._logged = dict(_metrics(trainer))
        if start.is_resumed:
            of_lightning.set_fetched(trainer, loader.ahead)
            if not loader.ahead:
                self._place.continue_pass(loader)
            self._place.begin_loop()

    def _end_step(self, loader: DrivenLoader) -> None:
        """End a step: the Trainer asks for a batch, so it is done with the last one."""
        trainer = self._trainer
        trained = self._before + of_lightning.num_ready(trainer)
        if of_lightning.is_in_step(trainer) or self._place.taken != trained + loader.ahead:
            refuse("This Trainer", [unsupported.READS_AHEAD])
        if self._reach_boundary():
            trainer.should_stop = True
            raise StopIteration

    def _reach_boundary(self) -> bool:
        assert self.run is not None
        before, self._logged = self._logged, dict(_metrics(self._trainer))
        new = {name: one for name, one in self._logged.items() if before.get(name) is not one}
        self.run.log(**new)
        step = of_lightning.num_ready(self._trainer)
        return self.run.boundary(step, epoch=self._trainer.current_epoch)

    # -- the NaN policy ----------------------------------------------------------------------------

    _loss: Any = None
    """The sum of the losses since an optimizer stepped; that of the last step before a backward.
    None in a batch for which `training_step` has returned none."""
    _is_spent = True

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """The losses that the last batch has spent are not those of this one."""
        if self._is_spent:
            self._loss = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Add the loss to those that the next optimizer step is checked with."""
        self._loss = loss.detach() if self._is_spent else self._loss + loss.detach()
        self._is_spent = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Without gradients the optimizer changes nothing: how a step is left out."""
        self._is_spent = True
        # Without a loss there is nothing to judge, but other ranks take part in the reduction.
        loss = torch.zeros((), device=pl_module.device) if self._loss is None else self._loss
        if self.run is not None and not self.run.should_step(loss):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None and of_torch.unscales_itself(optimizer):
                scaler.unscale_(optimizer)  # without gradients `step` finds nothing to check
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    # -- validation inside a step ------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation can take longer than a step, and a stop waits for its end."""
        if self.run is not None and self._has_begun:
            self._evaluation.enter_context(self.run.evaluating())

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Each batch counts as progress."""
        if self.run is not None and self._has_begun:
            self.run.check_stop()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The step continues."""
        self._evaluation.close()

    # -- the end -----------------------------------------------------------------------------------

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The training has ended, and the Trainer has saved what it saves at the end."""
        assert self.run is not None
        is_finished = False
        if not self._has_begun:  # a finished training was started again
            is_finished, self._logged = self.run.begin().is_finished, dict(_metrics(trainer))
        if not is_finished:
            self._state.end()
            if of_lightning.num_ready(trainer) > self.run.step:
                self._reach_boundary()
            self.run.end_loop()
        run, self.run = self.run, None
        run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A stop, or an error."""
        self._evaluation.close()
        run, self.run = self.run, None
        if run is not None:
            run.close(exception)


def _metrics(trainer: Any) -> Mapping[str, Any]:
    """The last values of `self.log`; without loggers Lightning keeps them for callbacks alone."""
    found: Mapping[str, Any] = (
        trainer.logged_metrics if trainer.loggers else trainer.callback_metrics
    )
    return found
