"""A classifier with Lightning's Trainer: one callback, and a wrapped loader."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from forge.integrations.lightning import ForgeCallback


class Classifier(pl.LightningModule):
    """A small network; its schedule follows the mean loss of an epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def loss(self, batch):
        """The mean loss of a batch."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def training_step(self, batch, batch_idx):
        """Log the loss, and its mean over the epoch."""
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the mean over the held-out data."""
        self.log("held_out", self.loss(batch))

    def configure_optimizers(self):
        """AdamW, and a schedule that monitors the mean loss."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"},
        }


def main():
    """Train for three epochs."""
    pl.seed_everything(1)
    inputs = torch.randn(1200, 20)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    train_data, held_out = random_split(data, [1000, 200])
    train_loader = DataLoader(train_data, 10, shuffle=True)
    module = Classifier()
    saves = pl.callbacks.ModelCheckpoint("runs/best", monitor="held_out")
    resume = ForgeCallback({"checkpoint": {"dir": "runs/lightning", "every_steps": 50}})
    trainer = pl.Trainer(
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[saves, resume],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, resume.loader(train_loader), DataLoader(held_out, 50))
    print(f"{trainer.global_step} steps, best loss {saves.best_model_score:.4f}")


if __name__ == "__main__":
    main()
