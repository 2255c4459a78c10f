"""Private parts of Lightning: the state of a Trainer that its checkpoints lack.

The functions are given objects of `lightning.pytorch` or of `pytorch_lightning`, whose private
parts are the same, and import neither.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

_LOOP_VALUES = (
    "_batches_that_stepped",
    "_has_run",
    "_last_train_dl_reload_epoch",
    "_last_val_dl_reload_epoch",
)
"""Attributes of loops that no `state_dict` of theirs has."""
_LOGGER_VALUES = (
    "_callback_metrics",
    "_current_fx",
    "_first_loop_iter",
    "_logged_metrics",
    "_progress_bar_metrics",
)
"""Attributes of the logger connector: the last values, and where in an epoch it is."""
_RESULT_VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset")
"""The state of one logged name, such as the sum of an epoch and the number of its samples."""
_SAVER_VALUES = (
    "current_score",
    "dirpath",
    "_defer_save_until_validation",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
)
"""Attributes of a ModelCheckpoint that its `state_dict` lacks, or does not load."""


def loops(loop: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A loop and all loops in it, by path.

    If it goes: see how `_Loop.state_dict` finds them.
    """
    yield path, loop
    for name, inner in vars(loop).items():
        if hasattr(inner, "_restarting"):
            yield from loops(inner, f"{path}.{name}" if path else name)


def loop_state(fit_loop: Any) -> dict[str, Any]:
    """The counters of the fit loop and of all loops in it, as they are inside a step.

    If it goes: see what `_Loop.state_dict` collects now, and which attributes `reset` of the loops
    sets. A value that is missing here shows in `tests/proofs/lightning.py`.
    """
    found: dict[str, Any] = {}
    for path, loop in loops(fit_loop):
        counters = {
            n: v.state_dict() for n, v in vars(loop).items() if hasattr(v, "from_state_dict")
        }
        values = {name: getattr(loop, name) for name in _LOOP_VALUES if hasattr(loop, name)}
        if hasattr(loop, "_seen_batches_per_dataloader"):
            values["_seen_batches_per_dataloader"] = dict(loop._seen_batches_per_dataloader)
        found[path] = {"counters": counters, "values": values}
    return found


def load_loop_state(fit_loop: Any, state: dict[str, Any]) -> None:
    """Restore the counters; no loop counts as restarted, so that none leaves anything out.

    If it goes: as for `loop_state`. A loop that counts as restarted skips the plateau schedules of
    its epoch.
    """
    for path, loop in loops(fit_loop):
        for name, counter in state[path]["counters"].items():
            getattr(loop, name).load_state_dict(counter)
        values = dict(state[path]["values"])
        if (seen := values.pop("_seen_batches_per_dataloader", None)) is not None:
            loop._seen_batches_per_dataloader.clear()
            loop._seen_batches_per_dataloader.update(seen)
        vars(loop).update(values)
        loop._restarting = loop._loaded_from_state_dict = False
        loop._resuming_from_checkpoint = False


def num_ready(trainer: Any) -> int:
    """Batches that the fit loop has been given, over all epochs.

    If it goes: see what `_TrainingEpochLoop.advance` counts before a step now.
    """
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def is_in_step(trainer: Any) -> bool:
    """Whether the fit loop has been given a batch that it is not done with.

    If it goes: see what `_TrainingEpochLoop.advance` counts before and after a step now.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready != progress.processed)


def set_fetched(trainer: Any, ahead: int) -> None:
    """Tell the fetcher how many batches of the epoch it has fetched, from which it knows the last.

    Args:
        trainer: The Trainer, whose counters are restored.
        ahead: Batches that it fetches ahead.

    If it goes: see how `_DataFetcher.__next__` finds out that a batch is the last one.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    trainer.fit_loop._data_fetcher.fetched = progress.current.ready + ahead


def length_of(combined: Any, mode: str) -> int:
    """Batches in a pass of a CombinedLoader; TypeError if it has no length.

    If it goes: see `CombinedLoader.__len__`; for one loader it is the smaller of length and limit.
    """
    kinds = home(combined)._SUPPORTED_MODES
    return len(kinds[mode]["iterator"](combined.flattened, combined.limits))


def home(combined: Any) -> Any:
    """The module that defines CombinedLoader, of which `combined` can have a subclass.

    If it goes: see where the iterators of its modes are defined.
    """
    kinds = type(combined).__mro__
    return next(sys.modules[kind.__module__] for kind in kinds if kind.__name__ == "CombinedLoader")


def joined(combined: Any, batches: list[Any]) -> Any:
    """One batch of each loader of a CombinedLoader, in the form in which the loaders were given.

    If it goes: see what `CombinedLoader.__next__` does with the batches now.
    """
    return home(combined).tree_unflatten(batches, combined._spec)


def mode_of(combined: Any) -> str:
    """How a CombinedLoader joins its loaders.

    If it goes: see what `CombinedLoader.__iter__` reads now.
    """
    return str(combined._mode)


def logger_state(trainer: Any) -> dict[str, Any]:
    """The last values of `self.log`.

    If it goes: see what `_LoggerConnector.reset_metrics` and `reset_results` reset.
    """
    connector = trainer._logger_connector
    found = {name: getattr(connector, name) for name in _LOGGER_VALUES}
    return {name: dict(one) if isinstance(one, dict) else one for name, one in found.items()}


def load_logger_state(trainer: Any, state: dict[str, Any]) -> None:
    """Restore them.

    If it goes: as for `logger_state`.
    """
    vars(trainer._logger_connector).update(state)


def results_state(trainer: Any) -> dict[str, Any]:
    """The sums of `self.log(on_epoch=True)` since the epoch began, which no checkpoint has.

    If it goes: see what `_ResultMetric` and `_Metadata` hold now. Without it, plateau schedules and
    callbacks get the mean of a part of the epoch.
    """
    found = {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        meta = {f.name: getattr(result.meta, f.name) for f in fields(result.meta)}
        sync = meta.pop("_sync")
        meta["reduce_fx"] = meta["reduce_fx"].__name__
        values = {n: getattr(result, n) for n in _RESULT_VALUES if hasattr(result, n)}
        if not result.is_tensor:
            values.pop("value")  # a torchmetrics.Metric of the module
        found[key] = {
            "is_tensor": result.is_tensor,
            "meta": meta,
            "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only, "op": sync.op},
            "values": values,
        }
    return found


def load_results_state(trainer: Any, state: dict[str, Any]) -> None:
    """Restore them.

    If it goes: as for `results_state`.
    """
    import torch

    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    kinds = sys.modules[type(results).__module__]
    results.clear()
    for key, saved in state.items():
        sync = kinds._Sync(
            trainer.strategy.reduce,
            _should=saved["sync"]["should"],
            rank_zero_only=saved["sync"]["rank_zero_only"],
            _op=saved["sync"]["op"],
        )
        given = {**saved["meta"], "reduce_fx": getattr(torch, saved["meta"]["reduce_fx"])}
        result = kinds._ResultMetric(kinds._Metadata(**given, _sync=sync), saved["is_tensor"])
        vars(result).update(saved["values"])
        if not saved["is_tensor"]:
            result.value = module.get_submodule(saved["meta"]["metric_attribute"])
        results[key] = result.to(module.device)


def metric_state(metric: Any, assigned: Collection[str]) -> dict[str, Any]:
    """The state of a metric or collection of torchmetrics, which no `state_dict` has.

    If it goes: `metric.persistent(True)` puts it there, except what is not from `add_state`.

    Args:
        metric: The metric or collection.
        assigned: The attributes that its methods assign, such as the number of updates.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    kinds = (str, int, float, torch.Tensor, type(None))

    def is_data(value: Any) -> bool:  # a string is an option, such as a prefix
        return not isinstance(value, str) and all(isinstance(v, kinds) for v in tree_leaves(value))

    states, own = getattr(metric, "_defaults", ()), vars(torch.nn.Module())
    return {
        name: value
        for name, value in vars(metric).items()
        if name in states or (name in assigned and name not in own and is_data(value))
    }


def load_metric_state(metric: Any, state: dict[str, Any]) -> None:
    """Restore it.

    If it goes: as for `metric_state`.
    """
    for name, value in state.items():
        setattr(metric, name, list(value) if isinstance(value, list) else value)


def saver_state(callback: Any) -> dict[str, Any]:
    """The attributes of a ModelCheckpoint that its `state_dict` lacks, such as its last save.

    If it goes: see which attributes `ModelCheckpoint.__init__` sets that `state_dict` lacks. A save
    that is repeated after a resume would get another name without them.
    """
    return {name: getattr(callback, name) for name in _SAVER_VALUES if hasattr(callback, name)}


def load_saver_state(callback: Any, state: dict[str, Any]) -> None:
    """Restore it.

    If it goes: as for `saver_state`.
    """
    vars(callback).update(state)


def leave_signals(trainer: Any) -> list[str]:
    """Keep a Trainer from handling signals, and from requeueing its job of Slurm; what it had.

    If it goes: see what installs handlers in `Trainer._run` now; `Run.begin` installs forge's
    again, but a signal before the first batch would be lost.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    environment = trainer._accelerator_connector.cluster_environment
    has_requeue = getattr(environment, "auto_requeue", False)
    return ["signal handlers", *(["requeue of the Slurm job"] if has_requeue else [])]


def starts_functions(trainer: Any) -> bool:
    """Whether a Trainer starts processes that run `fit` alone, and not the script.

    If it goes: see which launchers the strategies `ddp_spawn`, `ddp_fork` and `ddp_notebook` have.
    """
    kinds = type(trainer.strategy.launcher).__mro__
    return any(kind.__name__ == "_MultiProcessingLauncher" for kind in kinds)


def validates_by_time(trainer: Any) -> bool:
    """Whether it depends on the time when a Trainer validates.

    If it goes: see where the Trainer keeps a `val_check_interval` that is a time.
    """
    return getattr(trainer, "_val_check_time_interval", None) is not None
