"""The state of a Trainer apart from model, optimizers and schedules, as one object of a Run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torchmetrics

from forge.compat import of_lightning
from forge.integrations.callbacks import assigned
from forge.integrations.lightning.package import pytorch

_METRICS = (torchmetrics.Metric, torchmetrics.MetricCollection, torchmetrics.MetricTracker)


class TrainerState:
    """Counters, sums of an epoch, callbacks, metrics, and a batch that was fetched ahead.

    Args:
        trainer: The Trainer, whose strategy is set up.
        own: The callback that saves it, which has no state.
    """

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        self._own = own
        self.saved: dict[str, Any] | None = None
        """The state of the checkpoint from which this attempt has resumed."""
        self.is_over = False
        """Whether `fit` has done all its epochs or steps."""
        self._to_overwrite: dict[str, set[str]] = {}
        """Key of a ModelCheckpoint -> its files from steps that are repeated, until it has written
        them again."""

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        for one in self._trainer.callbacks:
            if one is not self._own:
                yield one.state_key, one

    def _savers(self) -> Iterator[tuple[str, Any]]:
        """The callbacks that write checkpoints into a directory."""
        for key, one in self._callbacks():
            if isinstance(one, pytorch.callbacks.ModelCheckpoint):
                yield key, one

    def move_files(self, directory: str) -> None:
        """Let callbacks write their checkpoints here: a rehearsal must not change a real run's."""
        for number, (_, saver) in enumerate(self._savers()):
            saver.dirpath = os.path.join(directory, f"lightning_{number}")

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """The metrics of torchmetrics in the module, and the collections and trackers of them."""
        for name, one in self._trainer.lightning_module.named_modules():
            if isinstance(one, _METRICS):
                yield name, one

    def end(self) -> None:
        """Note that `fit` has done all its epochs or steps."""
        self.is_over = True

    def state_dict(self) -> dict[str, Any]:
        """The state, as the Trainer's code sees it when it asks for a batch."""
        trainer, module = self._trainer, self._trainer.datamodule
        return {
            "loops": of_lightning.loop_state(trainer.fit_loop),
            "should_stop": trainer.should_stop,
            "logged": of_lightning.logger_state(trainer),
            "results": of_lightning.results_state(trainer),
            "metrics": {
                name: of_lightning.metric_state(one, assigned(one)) for name, one in self._metrics()
            },
            "trackers": {name: len(one) for name, one in self._metrics() if _is_tracker(one)},
            "callbacks": {key: one.state_dict() for key, one in self._callbacks()},
            "savers": {key: of_lightning.saver_state(one) for key, one in self._savers()},
            "files": {key: self._known_files(key, one) for key, one in self._savers()},
            "datamodule": {} if module is None else module.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "hooks": self._added_by_hooks(),
            "is_over": self.is_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        is_first, self.saved = self.saved is None, state
        trainer, module = self._trainer, self._trainer.datamodule
        self.restore_counters()
        of_lightning.load_logger_state(trainer, deepcopy(state["logged"]))
        of_lightning.load_results_state(trainer, deepcopy(state["results"]))
        for name, one in self._metrics():
            if _is_tracker(one):
                _resize(one, state["trackers"][name])  # before its metrics are listed
            of_lightning.load_metric_state(one, deepcopy(state["metrics"][name]))
        self._load_by_hooks(state["hooks"])
        for key, saver in self._savers():
            if os.path.isdir(state["savers"].get(key, {}).get("dirpath") or ""):
                saver.dirpath = state["savers"][key]["dirpath"]  # not that of a new logger version
        for key, one in self._callbacks():
            if kept := state["callbacks"].get(key):
                one.load_state_dict(deepcopy(kept))
        for key, saver in self._savers():
            of_lightning.load_saver_state(saver, state["savers"].get(key, {}))
            if is_first:
                again = {*_files(saver)} - {*state["files"].get(key, ())}
                self._to_overwrite[key] = again
                _overwrite(saver, again)
        if module is not None and state["datamodule"]:
            module.load_state_dict(deepcopy(state["datamodule"]))
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        self.is_over = state["is_over"]

    def _known_files(self, key: str, saver: Any) -> list[str]:
        return sorted({*_files(saver)} - self._to_overwrite.get(key, set()))

    def restore_counters(self) -> None:
        """Restore what decides how the Trainer begins its loops, such as the epoch."""
        assert self.saved is not None
        of_lightning.load_loop_state(self._trainer.fit_loop, deepcopy(self.saved["loops"]))
        self._trainer.should_stop = self.saved["should_stop"]

    # -- on_save_checkpoint ----------------------------------------------------------------------

    def _checkpoint(self) -> dict[str, Any]:
        """A checkpoint as Lightning's hooks expect it."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pytorch.__version__,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    def _added_by_hooks(self) -> dict[str, Any]:
        """The entries that the hooks `on_save_checkpoint` add to a checkpoint, or replace in it."""
        trainer, before = self._trainer, self._checkpoint()
        checkpoint = dict(before)
        for _, one in self._callbacks():
            one.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
        return {k: v for k, v in checkpoint.items() if k not in before or v is not before[k]}

    def _load_by_hooks(self, added: dict[str, Any]) -> None:
        trainer = self._trainer
        checkpoint = {**self._checkpoint(), **deepcopy(added)}
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        for _, one in self._callbacks():
            one.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)


def _is_tracker(metric: Any) -> bool:
    return isinstance(metric, torchmetrics.MetricTracker)


def _resize(tracker: Any, length: int) -> None:
    """Let a MetricTracker have as many metrics as at the save."""
    while len(tracker) < length:
        tracker.increment()
    while len(tracker) > length:
        delattr(tracker, str(len(tracker) - 1))


def _files(saver: Any) -> list[str]:
    """The checkpoints in the directory of a ModelCheckpoint, if it is on this machine."""
    is_here = saver.dirpath is not None and os.path.isdir(saver.dirpath)
    names = os.listdir(saver.dirpath) if is_here else []
    return [name for name in names if name.endswith(saver.FILE_EXTENSION)]


def _overwrite(saver: Any, names: set[str]) -> None:
    """Let a ModelCheckpoint write these files again, which it wrote in steps that are repeated.

    It would give another name to a file that exists.
    """
    found: Callable[..., bool] = saver.file_exists

    def file_exists(filepath: Any, trainer: Any) -> bool:
        is_there = found(filepath, trainer)
        name = os.path.basename(filepath)
        if name not in names:
            return is_there
        names.discard(name)
        return False

    saver.file_exists = file_exists
