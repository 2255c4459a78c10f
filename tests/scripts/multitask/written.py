"""Train a shared trunk with a regression head and a classification head on two data sets."""

from itertools import cycle

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

EPOCHS = 6

ConfigStore.instance().store("config", {"defaults": [{"resilience": "default"}, "_self_"]})


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1))
        self.value, self.label = nn.Linear(64, 1), nn.Linear(64, 3)

    def forward(self, a, b):
        return self.value(self.trunk(a)).squeeze(1), self.label(self.trunk(b))


@hydra.main(version_base=None, config_name="config")
def main(cfg):
    torch.manual_seed(0)
    a, b = torch.randn(512, 8), torch.randn(160, 8)
    values, labels = a.sin().sum(1), b[:, :3].argmax(1)
    regression = DataLoader(TensorDataset(a, values), batch_size=32, shuffle=True)
    classification = DataLoader(TensorDataset(b, labels), batch_size=32, shuffle=True)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for _ in run.epochs(EPOCHS):
            model.train()
            for (xa, ya), (xb, yb) in run.batches(zip(regression, cycle(classification))):
                value, label = model(xa, xb)
                value_loss, label_loss = F.mse_loss(value, ya), F.cross_entropy(label, yb)
                loss = value_loss + 0.5 * label_loss
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss, value_loss=value_loss, label_loss=label_loss)
            model.eval()
            with torch.no_grad():
                accuracy = (model(a, b)[1].argmax(1) == labels).float().mean()
            run.log(accuracy=accuracy)


if __name__ == "__main__":
    main()
