"""The private parts of Lightning that forge uses: lightning_parts.py <function>

Each function fails if its part no longer does what forge/compat/of_lightning.py needs.
"""

import copy
import logging
import os
import signal
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from forge.compat import of_lightning
from forge.integrations.callbacks import assigned


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, index):
        loss = self.layer(batch.float()[:, None]).square().mean()
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("held_out", batch.float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


class At(pl.Callback):
    """Calls a function as the loop asks for batch `number` (counted over all epochs)."""

    def __init__(self, number, function):
        self.number, self.function = number, function

    def on_train_batch_end(self, trainer, *given):
        if trainer.fit_loop.total_batch_idx + 1 == self.number:
            self.function(trainer)


def fitted(*callbacks, data=None, **options):
    """A Trainer after two epochs of six batches, with a validation in the middle of each."""
    module = Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[pl.callbacks.ModelCheckpoint(monitor="held_out"), *callbacks],
        **{"max_epochs": 2, "val_check_interval": 3, **options},
    )
    trainer.fit(module, DataLoader(range(12), 2) if data is None else data, DataLoader(range(2)))
    return trainer


def copied(state):
    return tree_map(lambda one: one.clone().detach() if torch.is_tensor(one) else one, state)


def taken_inside(function):
    """The result of a function of a Trainer, in the second epoch."""
    found = []
    fitted(At(8, lambda trainer: found.append(copied(function(trainer)))))
    return found[0]


def loop_state():
    state = taken_inside(lambda trainer: of_lightning.loop_state(trainer.fit_loop))
    assert set(state) >= {"", "epoch_loop", "epoch_loop.val_loop"}
    assert {"epoch_loop.automatic_optimization", "epoch_loop.manual_optimization"} <= set(state)
    assert state[""]["counters"]["epoch_progress"]["current"]["ready"] == 2
    assert state["epoch_loop"]["counters"]["batch_progress"]["total"]["ready"] == 8
    assert state["epoch_loop"]["values"]["_batches_that_stepped"] == 7
    assert "_last_train_dl_reload_epoch" in state[""]["values"]
    val = state["epoch_loop.val_loop"]["values"]
    assert {"_has_run", "_last_val_dl_reload_epoch", "_seen_batches_per_dataloader"} <= set(val)


def load_loop_state():
    saved = taken_inside(lambda trainer: of_lightning.loop_state(trainer.fit_loop))
    trainer = fitted(max_epochs=0)
    trainer.fit_loop.restarting = True
    of_lightning.load_loop_state(trainer.fit_loop, saved)
    assert of_lightning.loop_state(trainer.fit_loop) == saved
    assert not trainer.fit_loop.restarting
    assert not trainer.fit_loop.epoch_loop.restarting
    assert not getattr(trainer.fit_loop, "is_resuming", False)  # since 2.6


def num_ready():
    assert taken_inside(of_lightning.num_ready) == 8


def is_in_step():
    inside = []

    class Looks(pl.Callback):
        def on_before_optimizer_step(self, trainer, *given):
            inside.append(of_lightning.is_in_step(trainer))

    trainer = fitted(Looks())
    assert inside == [True] * 12
    assert not of_lightning.is_in_step(trainer)


def set_fetched():
    """The fetcher derives from the number which batch is the last one."""

    def skip(trainer):
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = 5
        of_lightning.set_fetched(trainer, 0)

    trainer = fitted(At(2, skip), max_epochs=1, val_check_interval=None)
    assert of_lightning.num_ready(trainer) == 3


def length_of():
    short, long = DataLoader(range(2)), DataLoader(range(5))
    for mode, length in (("min_size", 2), ("max_size", 5), ("max_size_cycle", 5)):
        combined = CombinedLoader([short, long], mode)
        combined.limits = [4, 4]
        assert of_lightning.length_of(combined, mode) == min(length, 4)
    combined = CombinedLoader([DataLoader(Stream())], "max_size_cycle")
    combined.limits = [float("inf")]
    with suppress(TypeError):
        raise AssertionError(of_lightning.length_of(combined, "max_size_cycle"))


def joined():
    combined = CombinedLoader({"a": DataLoader([1]), "b": [DataLoader([2])]})
    assert of_lightning.joined(combined, [1, 2]) == {"a": 1, "b": [2]}


def mode_of():
    assert of_lightning.mode_of(CombinedLoader([DataLoader([1])], "max_size")) == "max_size"


def logger_state():
    state = taken_inside(of_lightning.logger_state)
    assert {"loss", "loss_step", "held_out"} <= set(state["_callback_metrics"])
    assert state["_first_loop_iter"] is False


def load_logger_state():
    saved = taken_inside(of_lightning.logger_state)
    trainer = fitted(max_epochs=0)
    of_lightning.load_logger_state(trainer, saved)
    assert trainer.callback_metrics == saved["_callback_metrics"]


def results_state():
    state = taken_inside(of_lightning.results_state)
    loss, mean = state["training_step.loss"], state["training_step.mean"]
    assert loss["values"]["cumulated_batch_size"] == 4  # two batches of two
    assert loss["values"]["value"] > 0
    assert not mean["is_tensor"]
    assert mean["meta"]["metric_attribute"] == "mean"


def load_results_state():
    saved = taken_inside(of_lightning.results_state)
    found = []

    def restored(trainer):
        of_lightning.load_results_state(trainer, copy.deepcopy(saved))
        found.append(copied(of_lightning.results_state(trainer)))

    trainer = fitted(At(8, restored))
    assert str(found[0]) == str(saved)
    assert "loss_epoch" in trainer.callback_metrics


def state_of(metric):
    return of_lightning.metric_state(metric, assigned(metric))


def metric_state():
    metric = torchmetrics.MeanMetric()
    metric(torch.tensor([1.0, 3.0]))
    state = state_of(metric)
    assert (state["mean_value"], state["weight"], state["_update_count"]) == (4, 2, 1)
    equal = torchmetrics.MetricCollection({"a": metric, "b": metric.clone()}, prefix="train_")
    equal.update(torch.tensor([1.0]))
    state = state_of(equal)
    assert (state["_groups"], state["_groups_checked"]) == ({0: ["a", "b"]}, True)
    assert state["_state_is_copy"] is False
    assert "prefix" not in state


def load_metric_state():
    metric, other = torchmetrics.CatMetric(), torchmetrics.CatMetric()
    metric(torch.tensor([1.0, 3.0]))
    of_lightning.load_metric_state(other, state_of(metric))
    other(torch.tensor([5.0]))
    assert other.compute().tolist() == [1, 3, 5]
    assert metric.compute().tolist() == [1, 3]
    assert other.update_count == 2


def saver_state():
    state = of_lightning.saver_state(fitted().checkpoint_callback)
    assert state["_last_global_step_saved"] in (3, 6, 9, 12)
    assert Path(state["_last_checkpoint_saved"]).parent == Path(state["dirpath"])


def load_saver_state():
    saver, state = fitted().checkpoint_callback, {"_last_global_step_saved": 5, "dirpath": "x"}
    of_lightning.load_saver_state(saver, state)
    assert (saver._last_global_step_saved, saver.dirpath) == (5, "x")


def leave_signals():
    before, during = signal.getsignal(signal.SIGTERM), []

    class Leaves(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            assert of_lightning.leave_signals(trainer) == ["signal handlers"]

        def on_train_start(self, trainer, pl_module):
            during.append(signal.getsignal(signal.SIGTERM))

    fitted(Leaves())
    assert during == [before] == [signal.getsignal(signal.SIGTERM)]
    os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
    os.environ |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"}
    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=[SLURMEnvironment()], logger=False)
    assert len(of_lightning.leave_signals(trainer)) == 2


def starts_functions():
    options = {"accelerator": "cpu", "devices": 2, "logger": False}
    for strategy, expected in (("ddp", False), ("ddp_spawn", True)):
        trainer = pl.Trainer(strategy=strategy, **options)
        trainer.strategy._configure_launcher()
        assert of_lightning.starts_functions(trainer) is expected


def validates_by_time():
    assert not of_lightning.validates_by_time(fitted(max_epochs=0))
    if "str" in str(pl.Trainer.__init__.__annotations__["val_check_interval"]):  # since 2.6
        timed = fitted(max_epochs=0, val_check_interval="00:00:00:15")
        assert of_lightning.validates_by_time(timed)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)
    globals()[sys.argv[1]]()
