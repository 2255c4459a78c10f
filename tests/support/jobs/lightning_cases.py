"""Short trainings with Lightning under forge: lightning_cases.py <function>

What each function prints, and its exit code, is what its test looks at.
"""

import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from forge.integrations.lightning import ForgeCallback, package

DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


class Line(pl.LightningModule):
    """One layer; the loss of some batches is not a number."""

    def __init__(self, bad=(), lr=0.01):
        super().__init__()
        self.layer, self.bad, self.lr = torch.nn.Linear(3, 1), bad, lr

    def training_step(self, batch, index):
        factor = float("nan") if index in self.bad else 1.0
        return self.layer(batch).square().mean() * factor

    def validation_step(self, batch, index):
        self.log("held_out", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Reading(Line):
    def training_step(self, dataloader_iter):
        return self.layer(next(dataloader_iter)[0]).mean()


def resume(**policy):
    checkpoint = {"dir": "checkpoints", "every_steps": 2}
    return ForgeCallback({"checkpoint": checkpoint, **policy})


def trainer(*callbacks, **options):
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"max_epochs": 2, "devices": 1, "enable_checkpointing": False, **options}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **silent, **options)


def loader():
    return DataLoader(DATA, 4, shuffle=True)


def without_the_loader():
    trainer(resume()).fit(Line(), loader())


def with_unsupported_parts():
    forge, averaging = resume(), pl.callbacks.StochasticWeightAveraging(1e-2)
    trainer(averaging, forge).fit(Reading(), forge.loader(loader()))


def with_functions_as_processes():
    forge = resume()
    given = trainer(forge, devices=2, strategy="ddp_fork")
    given.fit(Line(), forge.loader(loader()))


class Sparse(Line):
    """Some batches have nothing to learn from."""

    def __init__(self, empty, **options):
        super().__init__(**options)
        self.empty = empty

    def training_step(self, batch, index):
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        loss = super().training_step(batch, index)
        return None if number in self.empty else loss


def with_empty_batches():
    """Batch 2 is bad and left out; batches 3, 7 and 8 have no loss."""
    forge, module = resume(nan={"action": "skip"}), Sparse((3, 7, 8), bad=(2,))
    trainer(forge).fit(module, forge.loader(loader()))
    print("weights", module.layer.weight.tolist(), "left out", forge_skipped())


def forge_skipped():
    from forge.jobdir import ledger

    events = [one for each in ledger.read("checkpoints").attempts for one in each.events]
    return [one["step"] for one in events if one["kind"] == "nan"]


def with_a_cli():
    from lightning.pytorch.cli import LightningCLI

    forge = resume()

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return forge.loader(loader())

    options = {"overwrite": True} if os.environ.get("OVERWRITES") else None
    given = {"callbacks": [forge], "max_epochs": 2, "accelerator": "cpu", "devices": 1}
    given |= {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    LightningCLI(
        Line,
        Data,
        args=["fit"],
        trainer_defaults=given,
        save_config_kwargs=options,
        seed_everything_default=1,
    )
    print("fitted")


def finished():
    forge, module = resume(), Line()
    given = trainer(forge, max_epochs=int(os.environ["EPOCHS"]))
    given.fit(module, forge.loader(loader()))
    print("weights", module.layer.weight.tolist(), given.global_step)


class Forgetful(pl.Callback):
    def __init__(self):
        self.mean = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * float(outputs["loss"])


def with_a_callback_without_state():
    forge, saves = resume(), pl.callbacks.ModelCheckpoint("saved")
    given = trainer(forge, Forgetful(), saves, enable_checkpointing=True)
    given.fit(Line(), forge.loader(loader()))


class Measured(Line):
    """A collection that forms its groups in the first batch, from metrics that are equal there.

    A tracker has a metric for each epoch, and another metric keeps its extremes.
    """

    def __init__(self):
        super().__init__()
        high = torchmetrics.classification.BinaryAccuracy(threshold=0.6)
        low = torchmetrics.classification.BinaryAccuracy(threshold=0.4)
        self.all = torchmetrics.MetricCollection({"high": high, "low": low})
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.epochs = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True)

    def on_train_epoch_start(self):
        self.epochs.increment()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        share = torch.linspace(0, 0.5 if self.global_step else 0.3, len(batch))
        self.all.update(share, torch.zeros(len(batch)).int())
        self.log_dict(self.all, on_step=False, on_epoch=True)
        self.extremes(loss.detach())
        self.epochs.update(loss.detach())
        self.log_dict({f"extreme_{name}": one for name, one in self.extremes.compute().items()})
        return loss

    def on_train_epoch_end(self):
        self.log("num_tracked", float(self.epochs.n_steps))
        self.log("best", self.epochs.compute_all().max())


def with_metrics():
    torch.manual_seed(3)
    forge = resume()
    given = trainer(forge)
    given.fit(Measured(), forge.loader(loader()))
    print({name: float(one) for name, one in given.callback_metrics.items()})


def with_bad_losses():
    torch.manual_seed(3)
    forge, module = resume(nan={"action": "skip"}), Line(bad=(1, 4))
    given = trainer(forge, accumulate_grad_batches=2)
    given.fit(module, forge.loader(loader()))
    print("weights", module.layer.weight.tolist())


class Scaled(Line):
    """Its optimizer divides the gradients by the scale itself."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01, fused=True)


def with_a_bad_loss_and_a_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    forge, module = resume(nan={"action": "skip"}), Scaled(bad=(1,))
    given = trainer(forge, plugins=[precision], max_epochs=1)
    given.fit(module, forge.loader(loader()))
    print("scale", scaler.get_scale(), module.layer.weight.tolist())


def beside_a_tuner_and_a_validation():
    forge, module = resume(), Line()
    given, train = trainer(forge), forge.loader(loader())
    Tuner(given).lr_find(module, train, num_training=3)
    given.fit(module, train, forge.loader(loader()))
    print("steps", given.global_step, "held out", "held_out" in given.callback_metrics)


def from_a_checkpoint_of_lightning():
    torch.manual_seed(3)
    given = trainer(enable_checkpointing=True, max_epochs=1)
    given.fit(Line(), loader())
    given.save_checkpoint("first.ckpt")
    forge, module = resume(), Line()
    given = trainer(forge)
    given.fit(module, forge.loader(loader()), ckpt_path="first.ckpt")
    given.save_checkpoint("second.ckpt")
    print("steps", given.global_step, "of", module.trainer.fit_loop.total_batch_idx + 1)


def releases():
    both = {"lightning", "pytorch_lightning"}
    name_of, problem_of = package.name_of, package.problem_of
    assert name_of({}, both.__contains__) == "lightning.pytorch"
    assert name_of({"pytorch_lightning"}, both.__contains__) == "pytorch_lightning"
    assert name_of(both | {"lightning.pytorch"}, both.__contains__) == "lightning.pytorch"
    assert name_of({}, {"pytorch_lightning"}.__contains__) == "pytorch_lightning"
    assert "found 2.4.0" in problem_of("2.4.0")
    assert "never" in problem_of("2.6.2")
    assert "never" in problem_of("2.6.3")
    assert problem_of("2.5.0") == problem_of("3.0.0rc1") == ""


def on_slurm():
    """As a job of Slurm, whose requeue Lightning would do itself."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    os.environ |= {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    forge = resume()
    given = trainer(forge, plugins=[SLURMEnvironment()])
    given.fit(Line(), forge.loader(loader()))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)
    globals()[sys.argv[1]]()
