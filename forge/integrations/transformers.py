"""`ForgeTrainer`: a transformers Trainer that stops, saves and resumes with the same bits.

The Trainer asks for the batches of a step only when everything of the last step is done: logging,
evaluation, schedules, callbacks, its own saving. So `get_batch_samples` is a step boundary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import forge
from forge import messages
from forge.integrations.refusal import missing

try:
    from transformers import TrainerCallback

    from forge.compat import of_transformers
    from forge.integrations.trainer_run import TrainerRun
except ImportError as error:
    raise missing("transformers", "transformers accelerate", error) from error


class _Callback(TrainerCallback):
    """Calls the run at the places of the loop for which only callbacks exist."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self._run.open(train_dataloader)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._run.check_loss()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._run.num_trained += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._run.num_trained += 1


class ForgeMixin(of_transformers.trainer_with_hooks()):  # type: ignore[misc]
    """`ForgeTrainer` for a subclass of the Trainer: `class Mine(ForgeMixin, SFTTrainer)`."""

    saved_attributes: ClassVar[tuple[str, ...]] = ()
    """Names of attributes of your subclass that training changes, to be saved."""

    def __init__(
        self,
        *args: Any,
        policy: Any = None,
        name: str | None = None,
        config: Any = None,
        **kwargs: Any,
    ) -> None:
        for given in (*args, *kwargs.values()):
            if getattr(given, "enable_jit_checkpoint", False) is True:
                given.enable_jit_checkpoint = False
                messages.say(
                    "enable_jit_checkpoint is switched off: forge saves when a signal arrives"
                )
        super().__init__(*args, **kwargs)
        if "FORGE_REHEARSAL" in os.environ:  # it must not change or delete a real run's files
            self.args.output_dir = os.path.join(os.environ["FORGE_REHEARSAL"], name or "trainer")
        self.loop_hooks = TrainerRun(self, policy, name, config)
        self.add_callback(_Callback(self.loop_hooks))

    @property
    def run(self) -> forge.Run | None:
        """The `forge.Run` of the training; None before `train` has built everything."""
        return self.loop_hooks.run

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, or resume from the newest checkpoint of forge.

        Args:
            resume_from_checkpoint: A checkpoint of the Trainer's own to begin with. It is used only
                as long as forge has no checkpoint.
            trial: Not supported: a search for hyperparameters calls `train` many times.
            args: As for `transformers.Trainer.train`.
            kwargs: The same.
        Raises:
            Exit: When the run is stopped; with code 78 if the Trainer has an option with which no
                resume would be exact.
        """
        self.loop_hooks.check(trial)
        if self.loop_hooks.find_checkpoint() and resume_from_checkpoint:
            messages.say(
                f"resume_from_checkpoint={resume_from_checkpoint} is ignored: forge has a"
                " checkpoint of this training, and resumes from it"
            )
            resume_from_checkpoint = None
        try:
            output = super().train(resume_from_checkpoint, trial, *args, **kwargs)
        except BaseException as error:
            self.loop_hooks.close(error)
            raise
        self.loop_hooks.close(None)
        return output

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """End the last step, and take the batches of the next one."""
        if not self.loop_hooks.begin_step():
            epoch_iterator = iter(())
        found = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        self.loop_hooks.took(len(found[0]))
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; forge checks the loss before the optimizer steps."""
        loss = super().training_step(*args, **kwargs)
        self.loop_hooks.note_loss(loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the hang detection gives it its own time limit."""
        with self.loop_hooks.evaluating():
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; each call counts as progress."""
        self.loop_hooks.advance()
        return super().prediction_step(*args, **kwargs)

    def log(self, logs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; forge records the values, too."""
        super().log(logs, *args, **kwargs)
        self.loop_hooks.log(logs)


class ForgeTrainer(ForgeMixin):
    """A `transformers.Trainer` that stops, saves and resumes with the same bits.

    Example::

        trainer = ForgeTrainer(model, arguments, train_dataset=data, policy=cfg.resilience)
        trainer.train()

    It stops between two steps (updates), when everything of a step is done: an evaluation and the
    Trainer's own saving belong to the step. Model, optimizer, schedule, the Trainer's counters and
    log history, callbacks with a state, random states and the place in the data are saved.

    Args:
        args: As for `transformers.Trainer`.
        policy: As for `forge.Run`.
        name: As for `forge.Run`, if a script has several trainers.
        config: As for `forge.Run`.
        kwargs: As for `transformers.Trainer`.
    """
