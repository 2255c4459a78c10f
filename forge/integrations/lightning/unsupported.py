"""The parts of Lightning with which a resume would not be exact, and what to use instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from forge.compat import of_lightning
from forge.integrations.callbacks import lost_on_resume
from forge.integrations.lightning.package import NAME, pytorch

NOT_WRAPPED = (
    "The training data is not forge's: give fit the result of ForgeCallback.loader(train_loader),"
    " or return it from train_dataloader."
)
READS_AHEAD = (
    "It asked for a batch before the step of the batch before was done, so a stop would lose a"
    " batch. Read the training data in the Trainer's own loop alone."
)
FINISHED = (
    "This training has finished at step {step}, and the Trainer is set to train on. Use another"
    " checkpoint directory, and begin with ckpt_path."
)
_TUNE = "Run it in a script of its own, and set the value that it finds."
_CALLBACKS = {
    "StochasticWeightAveraging": "It replaces schedules. Use EMAWeightAveraging.",
    "LearningRateFinder": _TUNE,
    "BatchSizeFinder": _TUNE,
    "BaseFinetuning": "It adds parameters to optimizers. Freeze layers by a learning rate of 0.",
    "ModelPruning": "It renames parameters. Prune after the training.",
}

_LIBRARIES = ("lightning", "pytorch_lightning", "forge")


def problems(trainer: Any) -> list[str]:
    """Why no resume of this Trainer could be exact; empty if nothing is known to prevent it."""
    return [*_of_strategy(trainer), *_of_callbacks(trainer), *_of_module(trainer)]


def _of_strategy(trainer: Any) -> Iterator[str]:
    kinds, strategy = pytorch.strategies, trainer.strategy
    supported = (kinds.SingleDeviceStrategy, kinds.DDPStrategy, kinds.ModelParallelStrategy)
    if not isinstance(strategy, supported) or isinstance(strategy, kinds.DeepSpeedStrategy):
        yield (
            f"{type(strategy).__name__} keeps state of its own, which forge does not save. Use"
            ' strategy="ddp", or ModelParallelStrategy (FSDP2).'
        )
    if of_lightning.starts_functions(trainer):
        yield (
            "Its processes run fit alone, and not the script, so no signal reaches them. Use"
            ' strategy="ddp", and start the script with srun or torchrun.'
        )


def _of_callbacks(trainer: Any) -> Iterator[str]:
    for name, remedy in _CALLBACKS.items():
        if any(isinstance(one, getattr(pytorch.callbacks, name)) for one in trainer.callbacks):
            yield f"The callback {name} changes the training in a way that is not saved. {remedy}"
    cli: Any = sys.modules.get(f"{NAME}.cli")  # it needs jsonargparse: imported by the script
    for one in trainer.callbacks if cli is not None else ():
        if isinstance(one, cli.SaveConfigCallback) and not one.overwrite:
            yield (
                "LightningCLI saves its config at each start, and the second start would fail if"
                ' the file exists. Write LightningCLI(…, save_config_kwargs={"overwrite": True}).'
            )


def _of_module(trainer: Any) -> Iterator[str]:
    if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
        yield "training_step takes dataloader_iter, so it reads ahead. Let it take the batch."


def remarks(trainer: Any) -> Iterator[str]:
    """A sentence for each callback and option with which a resume could be inexact."""
    if of_lightning.validates_by_time(trainer):
        yield "val_check_interval is a time. Use a number of batches."
    for one in trainer.callbacks:
        is_saved = _is_library(one) or _has_state(one)
        if not is_saved and (sentence := lost_on_resume(one)):
            yield f"{sentence}."


def _is_library(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] in _LIBRARIES


def _has_state(callback: Any) -> bool:
    kind, base = type(callback), pytorch.Callback
    has_hook = kind.on_save_checkpoint is not base.on_save_checkpoint
    return has_hook or kind.state_dict is not base.state_dict
