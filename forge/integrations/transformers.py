"""`ForgeTrainer`: a transformers Trainer that stops, saves and resumes by itself, to the bit.

The Trainer asks for the batches of a step only when everything of the last step is done: logging,
evaluation, schedules, callbacks, its own saving. So `get_batch_samples` is a step boundary.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import forge
from forge import messages
from forge.integrations.refusal import missing, refuse

try:
    from transformers import TrainerCallback

    from forge.compat import of_transformers
    from forge.integrations import prepared_loaders
    from forge.integrations.trainer_progress import TrainerProgress
except ImportError as error:
    raise missing("transformers", error) from error

_NOT_LOGGED = ("runtime", "per_second")
"""Ends of names whose values are times."""


class _Callback(TrainerCallback):
    """Calls the driver at two places of the Trainer's loop, and counts its batches."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self._driver.open(train_dataloader)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._driver.check_loss()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._driver.num_trained += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._driver.num_trained += 1


class _Driver:
    """The `forge.Run` of one call of `Trainer.train`."""

    def __init__(self, trainer: Any, policy: Any, name: str | None, config: Any) -> None:
        self._trainer = trainer
        self._given = policy, name, config
        self.run: forge.Run | None = None
        self.progress = TrainerProgress(trainer, trainer.saved_attributes)
        self._saved: dict[str, Any] | None = None
        """The progress in the checkpoint; None: there is none."""
        self._has_begun = False
        self._epoch = self._in_epoch = 0
        self._last_step = 0
        """The Trainer's step at the last boundary."""
        self._loss: Any = None
        """Sum of the losses since the last update."""
        self.num_trained = 0
        """Batches that the Trainer has trained on, as its callbacks count them."""

    def _new_run(self, **objects: Any) -> forge.Run:
        policy, name, config = self._given
        return forge.Run(policy, name=name, config=config, **objects)

    # -- before the loop -----------------------------------------------------------------------

    def look(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        self.run, self._has_begun, self._saved = None, False, self._new_run().peek("trainer")
        return self._saved is not None

    def find_place(self, num_epochs: int) -> tuple[int, int] | None:
        """Restore the Trainer's counters; the epoch, and the batches in it, to continue at."""
        if self._saved is None:
            return None
        self.progress.restore_counters(self._saved)
        epoch, in_epoch, _, is_over = self._saved["place"]
        return (num_epochs, 0) if is_over else (epoch, in_epoch)

    def open(self, loader: Any) -> None:
        """Everything is built: claim the directory, and resume."""
        trainer = self._trainer
        if found := prepared_loaders.problems(loader, trainer.accelerator.num_processes):
            refuse("The data of this Trainer", found)
        self._loader, self._batches = prepared_loaders.read(loader)
        scaler = getattr(trainer.accelerator, "scaler", None)
        self.run = self._new_run(
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            schedule=trainer.lr_scheduler,
            trainer=self.progress,
            loader=self._batches,
            **({} if scaler is None else {"scaler": scaler}),
        ).open()

    # -- the loop ------------------------------------------------------------------------------

    def before_pass(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The Trainer's arguments for a pass: it reads the counted loader, from the saved place."""
        self._epoch = arguments["epoch"]
        is_resumed = self._saved is not None and self._epoch == arguments["epochs_trained"]
        self._in_epoch = arguments["steps_trained_in_current_epoch"] if is_resumed else 0
        changed: dict[str, Any] = {"train_dataloader": self._loader}
        if is_resumed:  # only then the Trainer counts from this place; nothing is read from there
            changed["resume_from_checkpoint"] = os.devnull
        return arguments | changed

    def skip_batches(self, loader: Any, count: int) -> Any:
        """The loader for a pass that the Trainer resumes: forge places its own."""
        return loader

    def begin_step(self) -> bool:
        """End the last step, and begin another; False if the loop should end."""
        assert self.run is not None
        self._loss = None
        is_over = self._end_step() if self._has_begun else self._begin()
        if is_over:
            self._trainer.control.should_training_stop = True
        return not is_over

    def _begin(self) -> bool:
        assert self.run is not None
        self.progress.epoch, self.progress.in_epoch = self._epoch, self._in_epoch
        start = self.run.begin()
        self._has_begun, self._last_step = True, self._trainer.state.global_step
        self.num_trained = self.progress.batches
        return start.is_finished

    def _end_step(self) -> bool:
        """Whether the loop should end now."""
        assert self.run is not None
        step, progress = self._trainer.state.global_step, self.progress
        if step == self._last_step:  # the batches of a pass have ended inside an accumulation
            return False
        progress.epoch, progress.in_epoch = self._epoch, self._in_epoch
        self._last_step, progress.batches = step, self.num_trained
        return self.run.boundary(step, epoch=self._epoch, taken=progress.batches)

    def took(self, count: int) -> None:
        """The Trainer has taken the batches of a step."""
        self._in_epoch += count

    def after_pass(self) -> None:
        """The Trainer does not read a pass until it ends by itself."""
        self._batches.end_pass(self.num_trained)

    def before_end(self) -> None:
        """The loop is over."""
        assert self.run is not None
        if not self._has_begun:  # a finished training was started again
            self._begin()
        self.progress.is_over = True
        self._end_step()
        self.run.end_loop()

    def close(self, error: BaseException | None) -> None:
        """`Trainer.train` has ended."""
        if self.run is not None:
            self.run.close(error)

    # -- losses and metrics --------------------------------------------------------------------

    def note_loss(self, loss: Any) -> None:
        """Add the loss of a batch to that of the next update."""
        self._loss = loss if self._loss is None else self._loss + loss

    def check_loss(self) -> None:
        """Apply the NaN policy to the next update: without gradients the optimizer does nothing."""
        if self.run is None or self._loss is None or self.run.should_step(self._loss):
            return
        for parameter in self._trainer.model.parameters():
            parameter.grad = None

    def log(self, logs: Mapping[str, Any]) -> None:
        """Record what the Trainer logs, apart from times."""
        if self.run is not None:
            kept = {
                name: value
                for name, value in logs.items()
                if isinstance(value, numbers.Real) and not name.endswith(_NOT_LOGGED)
            }
            self.run.log(**kept)


class ForgeMixin(of_transformers.trainer_with_hooks()):  # type: ignore[misc]
    """For subclasses of a Trainer, as in `class Mine(ForgeMixin, SFTTrainer)`: see ForgeTrainer."""

    saved_attributes: ClassVar[tuple[str, ...]] = ()
    """Names of attributes of your subclass that change while it trains, to be saved."""

    def __init__(
        self,
        *args: Any,
        policy: Any = None,
        name: str | None = None,
        config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.loop_hooks = _Driver(self, policy, name, config)
        self.add_callback(_Callback(self.loop_hooks))

    @property
    def run(self) -> forge.Run | None:
        """The `forge.Run` of the training; None before `train` has built everything."""
        return self.loop_hooks.run

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or resume from forge's newest checkpoint.

        Args:
            resume_from_checkpoint: A checkpoint of the Trainer's own to begin from, as long as
                forge has none.
            args: As for `transformers.Trainer.train`.
            kwargs: The same.
        """
        if self.loop_hooks.look() and resume_from_checkpoint:
            messages.say(
                f"resume_from_checkpoint={resume_from_checkpoint} is not used: forge has newer"
                " checkpoints of this training, and resumes from them"
            )
            resume_from_checkpoint = None
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self.loop_hooks.close(error)
            raise
        self.loop_hooks.close(None)
        return output

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """A step boundary, then the batches of the next step."""
        if not self.loop_hooks.begin_step():
            epoch_iterator = iter(())
        found = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        self.loop_hooks.took(len(found[0]))
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the loss is checked before the optimizer steps."""
        loss = super().training_step(*args, **kwargs)
        self.loop_hooks.note_loss(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; forge records the values, too."""
        super().log(logs, *args, **kwargs)
        self.loop_hooks.log(logs)


class ForgeTrainer(ForgeMixin):
    """A `transformers.Trainer` that survives its cluster."""
