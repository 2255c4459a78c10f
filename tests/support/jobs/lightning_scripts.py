"""Eight scripts that train with Lightning, with `ForgeCallback` and without it.

    python lightning_scripts.py DIRECTORY '{"script": "automatic", "hits": {"step 7": "TERM"}}'

Each leaves in `final_<rank>.pt` what its training ended with. A hit is a signal that the process
sends itself in a place: "step 7" (a batch, counted over all epochs), "validation 2", "save 3" (as a
state is collected, by forge or by Lightning), "commit 1" (as a checkpoint of forge is about to get
its name), or "end".
"""

import json
import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

if os.environ.get("FORGE_TEST_PACKAGE") == "pytorch_lightning":
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from pytorch_lightning.utilities import CombinedLoader
else:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from lightning.pytorch.utilities import CombinedLoader

POINTS = torch.randn(100, 6, generator=torch.Generator().manual_seed(7))
VALUES = (POINTS.sum(1) > 0).long()


class Drawing(Dataset):
    """Points with noise that is drawn as they are read."""

    def __init__(self, length=90):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return POINTS[index] + 0.1 * torch.randn(6), VALUES[index]


class Stream(IterableDataset):
    """Points without a length, in an order that is drawn."""

    def __iter__(self):
        for index in torch.randperm(90).tolist():
            yield POINTS[index] + 0.1 * torch.randn(6), VALUES[index]


HELD_OUT = DataLoader(TensorDataset(POINTS[60:], VALUES[60:]), 20)


class Net(pl.LightningModule):
    """Dropout, averages of a BatchNorm, and a mean over the epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if index % 3 == 1:
            self.log("sometimes", loss * 2, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, index):
        self.log("held_out", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"},
        }


class Adversaries(pl.LightningModule):
    """Two optimizers that are stepped by hand, schedules by step and epoch, and metrics."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch, index):
        x, _ = batch
        makes, judges = self.optimizers()
        by_step, by_epoch = self.lr_schedulers()
        made = self.maker(torch.randn(len(x), 3))
        self.toggle_optimizer(judges)
        real = torch.cat([torch.ones(len(x)), torch.zeros(len(x))]).long()
        found = self.judge(torch.cat([x, made.detach()]))
        self.manual_backward(nn.functional.cross_entropy(found, real))
        if index % 2:
            self.clip_gradients(judges, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            judges.step()
            judges.zero_grad()
            by_step.step()
        self.untoggle_optimizer(judges)
        self.accuracy(found, real)
        self.seen.update(len(x))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        loss = nn.functional.cross_entropy(self.judge(made), torch.ones(len(x)).long())
        self.manual_backward(loss)
        makes.step()
        makes.zero_grad()
        self.log("fooled", loss)
        if self.trainer.is_last_batch:
            by_epoch.step()

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute())

    def validation_step(self, batch, index):
        self.log("held_out", self.judge(batch[0]).var())

    def configure_optimizers(self):
        makes = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        judges = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.ExponentialLR(judges, 0.99)
        return [makes, judges], [by_step, torch.optim.lr_scheduler.StepLR(makes, 2)]


class Averaging(Callback):
    """The moving average that people write."""

    def on_fit_start(self, trainer, pl_module):
        if not hasattr(self, "average"):
            self.average = {k: v.clone() for k, v in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 0.1) if value.is_floating_point() else None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class Data(pl.LightningDataModule):
    """Counts its passes, and makes its loaders anew for each epoch."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap, self.num_made = wrap, 0

    def train_dataloader(self):
        self.num_made += 1
        return self.wrap(DataLoader(Drawing(), 6, shuffle=True, num_workers=2))

    def val_dataloader(self):
        return HELD_OUT

    def state_dict(self):
        return {"num_made": self.num_made}

    def load_state_dict(self, state):
        self.num_made = state["num_made"]


class Monitored(Net):
    """Logs a metric as an object, steps a schedule in each step, and keeps a number of its own."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)
        self.worst = 0.0

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.accuracy(self.net(batch[0]), batch[1])
        self.worst = max(self.worst, loss.item())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "worst": self.worst}, on_step=True)
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["worst"] = self.worst

    def on_load_checkpoint(self, checkpoint):
        self.worst = checkpoint["worst"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Pairs(Net):
    """Batches of two loaders at once; draws as an epoch begins."""

    def on_train_epoch_start(self):
        torch.rand(3)

    def training_step(self, batch, index):
        loss = self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


# -- the scripts -----------------------------------------------------------------------------------


def automatic(fit):
    """Accumulation with an odd rest, clipping, a plateau schedule, early stopping, fp32."""
    saves = ModelCheckpoint("saved", monitor="held_out", save_top_k=2, save_last=True)
    fit(
        Net(),
        DataLoader(Drawing(), 6, shuffle=True),
        [saves, EarlyStopping("held_out", patience=50)],
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )


def manual(fit):
    """Two optimizers by hand, and metrics of torchmetrics."""
    saves = ModelCheckpoint("saved", every_n_train_steps=7, save_top_k=-1)
    fit(Adversaries(), DataLoader(Drawing(), 6, shuffle=True), [saves], max_epochs=3)


def stream(fit):
    """No length, so that Lightning reads ahead; validation within an epoch; a limit of steps."""
    fit(
        Net(),
        DataLoader(Stream(), 6),
        [Averaging(), ModelCheckpoint("saved", monitor="held_out", save_top_k=1)],
        max_steps=40,
        val_check_interval=4,
        precision="bf16-mixed",
    )


def combined(fit):
    """Two loaders, of which the shorter one begins again."""
    loaders = {
        "a": DataLoader(Drawing(), 6, shuffle=True),
        "b": DataLoader(Drawing(40), 5, shuffle=True, num_workers=1),
    }
    fit(Pairs(), CombinedLoader(loaders, "max_size_cycle"), [], max_epochs=3)


def streams(fit):
    """A loader without a length, next to a shorter one with workers that live for all epochs."""
    points = TensorDataset(POINTS[:40], VALUES[:40])
    loaders = {
        "a": DataLoader(Stream(), 6),
        "b": DataLoader(points, 5, shuffle=True, num_workers=1, persistent_workers=True),
    }
    kinds = [getattr(pl.callbacks, "EMAWeightAveraging", None)]  # since 2.6
    averages = [kind(decay=0.9) for kind in kinds if kind]
    fit(Pairs(), CombinedLoader(loaders, "max_size_cycle"), averages, max_epochs=3)


def datamodule(fit):
    """Loaders made anew for each epoch, workers, a limit of batches, hooks of checkpoints."""
    fit(
        Monitored(),
        Data,
        [ModelCheckpoint("saved", every_n_train_steps=5, monitor="loss", save_last=True)],
        max_epochs=4,
        limit_train_batches=11,
        reload_dataloaders_every_n_epochs=1,
        check_val_every_n_epoch=2,
    )


class Sharded(Net):
    """Shards its layers itself, as Lightning wants it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for one in (*self.net, self.net):
            if any(True for _ in one.parameters()):
                fully_shard(one, mesh=self.device_mesh["data_parallel"])


def sharded(fit):
    """FSDP2 on two ranks."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fit(
        Sharded(),
        DataLoader(Drawing(), 6, shuffle=True),
        [],
        max_epochs=3,
        devices=2,
        strategy=strategy,
    )


def ranks(fit):
    """DDP on two ranks: Lightning puts in its sampler, and each rank has a mean of its own."""
    fit(
        Net(),
        DataLoader(Drawing(), 6, shuffle=True),
        [ModelCheckpoint("saved", monitor="held_out")],
        max_epochs=3,
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=2,
    )


SCRIPTS = {
    one.__name__: one
    for one in (automatic, manual, stream, streams, combined, datamodule, ranks, sharded)
}


# -- hits, and what is left ------------------------------------------------------------------------


class Hits(Callback):
    """Sends this process the signals of its attempt, and notes the batches."""

    def __init__(self, directory, hits):
        self.directory, self.hits = directory, hits
        self.num = {"validation": 0, "save": 0, "commit": 0}
        rename, replace = os.rename, os.replace
        os.rename, os.replace = self.watched(rename), self.watched(replace)

    def watched(self, move):
        def moved(source, target, **options):
            if Path(target).name.startswith("step_"):
                self.count("commit")
            return move(source, target, **options)

        return moved

    def reach(self, place):
        name = self.hits.pop(place, None)
        if name:
            os.kill(os.getpid(), signal.Signals["SIG" + name])

    def count(self, what):
        self.num[what] += 1
        self.reach(f"{what} {self.num[what]}")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        number = trainer.fit_loop.total_batch_idx
        if trainer.is_global_zero:
            with (self.directory / "steps.txt").open("a") as file:
                file.write(f"{number}\n")
        self.reach(f"step {number}")

    def on_validation_batch_start(self, trainer, *given):
        if not trainer.sanity_checking:
            self.count("validation")

    def on_save_checkpoint(self, *given):
        self.count("save")

    def on_train_end(self, *given):
        self.reach("end")


def play(directory, spec):
    """Train; returns what the training ended with."""
    directory = Path(directory)
    os.chdir(directory)
    warnings.filterwarnings("ignore")
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    callbacks = [Hits(directory, json.loads(os.environ.get("HITS", "{}")))]

    def fit(module, data, own, **given):
        wrap = lambda loader: loader  # noqa: E731
        if not spec.get("is_plain"):
            from forge.integrations.lightning import ForgeCallback

            checkpoint = {"dir": str(directory / "checkpoints"), "every_steps": 9}
            policy = {"checkpoint": checkpoint, "shutdown": {"timeout_s": 20}}
            resume = ForgeCallback(policy | spec.get("policy", {}))
            callbacks.append(resume)
            wrap = resume.loader
        silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = pl.Trainer(
            accelerator="cpu", callbacks=[*own, *callbacks], **{**{"devices": 1}, **given}, **silent
        )
        if data is Data:
            trainer.fit(module, datamodule=Data(wrap), ckpt_path=spec.get("ckpt_path"))
        else:
            trainer.fit(module, wrap(data), HELD_OUT, ckpt_path=spec.get("ckpt_path"))
        left = tree_map(
            lambda one: getattr(one, "to_local", lambda: one)(), left_by(trainer, module)
        )
        torch.save(left, directory / f"final_{trainer.global_rank}.pt")

    SCRIPTS[spec["script"]](fit)


def left_by(trainer, module):
    """All that a script can read after `fit`, and its next random numbers."""
    return {
        "module": module.state_dict(),
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "schedules": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "callbacks": {
            one.state_key: {k: v for k, v in one.state_dict().items() if k != "dirpath"}
            for one in trainer.callbacks
            if type(one).__name__ != "ForgeCallback"
        },
        "callback_metrics": dict(sorted(trainer.callback_metrics.items())),
        "logged_metrics": dict(sorted(trainer.logged_metrics.items())),
        "counters": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx],
        "random": [torch.rand(1), np.random.rand(), random.random()],
    }


if __name__ == "__main__":
    play(sys.argv[1], json.loads(sys.argv[2]))
