"""Private parts of transformers: the loop of its Trainer."""

from __future__ import annotations

import functools
from typing import Any

_SUMS = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
"""Running sums of the loop, from which the Trainer computes the values that it logs."""


@functools.cache
def trainer_with_hooks() -> Any:
    """A subclass of `transformers.Trainer` whose loop calls the methods of its `loop_hooks`.

        find_place(num_epochs)     before the optimizer is built: the epoch, and the batches trained
                                   on in it, at which the loop begins; None: as the Trainer says
        before_pass(arguments)     returns the arguments of the pass, changed
        skip_batches(loader, n)    the loader without its first batches, for a pass that is resumed
        after_pass()               everything of the pass is done
        before_end()               the loop is over, and its totals are not logged yet

    If it goes: see which methods `Trainer._inner_training_loop` calls today to set its counters,
    to run a pass and to log its totals, and how the pass skips batches.
    """
    import transformers.trainer as module

    if not hasattr(module.Trainer, "_run_epoch"):  # its running mean is a local variable before
        raise ImportError(
            f"forge.integrations.transformers needs transformers 5.3 or newer, and this is"
            f" {module.__version__}: in an older Trainer the mean of the losses that it logs"
            " is a local variable, which cannot be saved. Run: pip install 'transformers>=5.3'"
        )

    class TrainerWithHooks(module.Trainer):
        loop_hooks: Any

        def _init_training_state(
            self, max_steps: int, steps: int, epochs: int, *others: Any
        ) -> Any:
            its_own = super()._init_training_state(max_steps, steps, epochs, *others)
            return self.loop_hooks.find_place(epochs) or its_own

        def _run_epoch(self, **arguments: Any) -> None:
            skip = module.skip_first_batches
            module.skip_first_batches = self.loop_hooks.skip_batches
            try:
                super()._run_epoch(**self.loop_hooks.before_pass(arguments))
                self.loop_hooks.after_pass()
            finally:
                module.skip_first_batches = skip

        def _finalize_training(self, *arguments: Any) -> Any:
            self.loop_hooks.before_end()
            return super()._finalize_training(*arguments)

    return TrainerWithHooks


def sums(trainer: Any) -> dict[str, Any]:
    """The running sums of a Trainer's loop.

    If it goes: see from what `Trainer._maybe_log_save_evaluate` and `_finalize_training` compute
    the losses that they log.
    """
    return {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)}


def restore_sums(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore the running sums.

    If it goes: as for `sums`.
    """
    for name, value in saved.items():
        before = getattr(trainer, name)
        setattr(trainer, name, value.to(before.device) if hasattr(value, "to") else value)


def names_of_lasting_eval_loaders(trainer: Any) -> list[str]:
    """The names of the evaluation loaders that a Trainer keeps, since their workers persist.

    If it goes: see where `Trainer.get_eval_dataloader` keeps loaders with persistent workers.
    """
    return list(getattr(trainer, "_eval_dataloaders", {}))
