"""The `forge.Run` of a transformers Trainer: opened, moved from step to step and closed by it."""

from __future__ import annotations

import contextlib
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Any

import forge
from forge import messages
from forge.compat import of_trl
from forge.integrations import prepared_loaders
from forge.integrations.refusal import refuse
from forge.integrations.trainer_progress import TrainerProgress, without_times


class TrainerRun:
    """The `forge.Run` of `Trainer.train`; the hooks of `of_transformers.trainer_with_hooks`.

    Args:
        trainer: A `transformers.Trainer`.
        policy: As for `forge.Run`.
        name: The same.
        config: The same.
    """

    def __init__(self, trainer: Any, policy: Any, name: str | None, config: Any) -> None:
        self._trainer = trainer
        self._given = policy, name, config
        self.run: forge.Run | None = None
        self._is_open = False
        self._progress = TrainerProgress(trainer)
        self._saved: dict[str, Any] | None = None
        """The progress in forge's newest checkpoint; None: there is no checkpoint."""
        self._has_begun = False
        """Whether `run.begin` was called."""
        self._epoch = self._in_epoch = self._last_step = 0
        self.num_trained = 0
        """Batches trained on, as the Trainer's callbacks count them, over all attempts."""
        self._loss: Any = None
        """The sum of the losses since the last update."""

    def _new_run(self, **objects: Any) -> forge.Run:
        policy, name, config = self._given
        return forge.Run(policy, name=name, config=config, **objects)

    # -- before the loop -----------------------------------------------------------------------

    def check(self, trial: Any) -> None:
        """Refuse what no resume could repeat."""
        trainer, problems = self._trainer, []
        if trial is not None or trainer.hp_search_backend is not None:
            problems.append(
                "hyperparameter_search trains several times with one Trainer. Make a Trainer for"
                " each trial, with a `name` of its own, or use a sweep of forge's launchers."
            )
        if trainer.args.auto_find_batch_size:
            problems.append(
                "auto_find_batch_size=True can change the batch size when the job starts again."
                " Set it to False, and per_device_train_batch_size to a size that fits."
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            problems.append(
                "DeepSpeed and FSDP divide the model among the ranks in a way that was not tested"
                " with forge. Use DDP, or FSDP2 in a loop of your own with forge.Run."
            )
        if of_trl.keeps_batches(trainer):
            problems.append(
                f"{type(trainer).__name__} uses generated batches in several steps, and forge does"
                " not save them. Use `forge exec` and the Trainer's own checkpoints."
            )
        if problems:
            refuse("This Trainer", problems)

    def find_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        self._saved, self._has_begun = self._new_run().peek("trainer"), False
        return self._saved is not None

    def find_place(self, num_epochs: int) -> tuple[int, int] | None:
        """Restore the Trainer's counters; the epoch, and the batches in it, to continue at."""
        if self._saved is None:
            return None
        arguments = self._trainer.args
        # Options for a start, and for the Trainer's own resume.
        arguments.eval_on_start = arguments.ignore_data_skip = False
        self._progress.restore_counters(self._saved)
        epoch, in_epoch, _, is_over = self._saved["place"]
        return (num_epochs, 0) if is_over else (epoch, in_epoch)

    def open(self, loader: Any) -> None:
        """Everything is built: claim the directory, and resume."""
        trainer, scaler = self._trainer, getattr(self._trainer.accelerator, "scaler", None)
        if found := prepared_loaders.problems(loader, trainer.accelerator.num_processes):
            refuse("The data of this Trainer", found)
        for sentence in self._progress.unsaved():
            messages.warn(f"Not known to resume exactly: {sentence}")
        self._loader, self._batches = prepared_loaders.read(loader)
        self.num_trained = 0
        self.run = self._new_run(
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            schedule=trainer.lr_scheduler,
            accelerator=trainer.accelerator,  # older Trainers set its number of steps
            trainer=self._progress,
            loader=self._batches,
            **({} if scaler is None else {"scaler": scaler}),
        ).open()
        self._is_open = True

    # -- the loop ------------------------------------------------------------------------------

    def before_pass(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a pass: the counted loader, from the saved place."""
        self._epoch, first = arguments["epoch"], arguments["epochs_trained"]
        is_first = self._epoch == first
        self._in_epoch = arguments["steps_trained_in_current_epoch"] if is_first else 0
        changed: dict[str, Any] = {"train_dataloader": self._loader}
        if is_first and self._saved is not None:
            # The Trainer continues inside a pass only with a checkpoint; it finds nothing in this.
            changed["resume_from_checkpoint"] = os.devnull
        return arguments | changed

    def skip_batches(self, loader: Any, count: int) -> Any:
        """The loader without its first batches; after a resume forge has skipped them."""
        if self._saved is None:
            self._batches.skip(count)
            self.num_trained += count
        return loader

    def begin_step(self) -> bool:
        """End the last step, and begin another; False if the loop should end."""
        self._loss = None
        is_over = self._end_step() if self._has_begun else self._begin()
        if is_over:
            self._trainer.control.should_training_stop = True
        return not is_over

    def _begin(self) -> bool:
        """Begin the loop; whether it has already ended."""
        assert self.run is not None
        self._progress.advance(self._epoch, self._in_epoch, self.num_trained)
        start = self.run.begin()
        self._has_begun, self._last_step = True, self._trainer.state.global_step
        self.num_trained = self._progress.place[2]
        return start.is_finished

    def _end_step(self) -> bool:
        """End a step at a boundary; whether the loop should end."""
        assert self.run is not None
        step = self._trainer.state.global_step
        if step == self._last_step:  # a pass has ended inside an accumulation
            return False
        self._last_step = step
        self._progress.advance(self._epoch, self._in_epoch, self.num_trained)
        return self.run.boundary(step, epoch=self._epoch, taken=self.num_trained)

    def took(self, count: int) -> None:
        """The Trainer has taken the batches of a step."""
        self._in_epoch += count

    def after_pass(self) -> None:
        """The Trainer leaves a pass after its last batch without reading its end."""
        self._batches.end_pass(self.num_trained)

    def before_end(self) -> None:
        """The loop is over."""
        assert self.run is not None
        if not self._has_begun:  # a finished training was started again
            self._begin()
        self._progress.end()
        self._end_step()
        self.run.end_loop()

    def close(self, error: BaseException | None) -> None:
        """`Trainer.train` has ended."""
        if self.run is not None and self._is_open:
            self._is_open = False
            self.run.close(error)

    # -- inside a step -------------------------------------------------------------------------

    def note_loss(self, loss: Any) -> None:
        """Add the loss of a batch to that of the next update."""
        self._loss = loss if self._loss is None else self._loss + loss

    def check_loss(self) -> None:
        """Apply the NaN policy to the next update: without gradients the optimizer does nothing."""
        if self.run is not None and self._loss is not None and not self.run.should_step(self._loss):
            for parameter in self._trainer.model.parameters():
                parameter.grad = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation inside or outside the loop."""
        with self.run.evaluating() if self._has_step else contextlib.nullcontext():  # type: ignore[union-attr]
            yield

    def advance(self) -> None:
        """A batch of an evaluation begins."""
        if self.run is not None and self._has_step:
            self.run.check_stop()

    @property
    def _has_step(self) -> bool:
        return self._is_open and self._has_begun

    def log(self, logs: Mapping[str, Any]) -> None:
        """Record what the Trainer logs, apart from times."""
        if self.run is not None and self._is_open:
            values = without_times(logs).items()
            self.run.log(**{name: one for name, one in values if isinstance(one, numbers.Real)})
