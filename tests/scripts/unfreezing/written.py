"""Train a small classifier whose layers are unfrozen one after the other, with early stopping."""

import copy

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

EPOCHS, PATIENCE = 10, 3
UNFREEZE = {2: 2, 4: 0}  # epoch: index of the layer

ConfigStore.instance().store("config", {"defaults": [{"resilience": "default"}, "_self_"]})


def evaluate(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


@hydra.main(version_base=None, config_name="config")
def main(cfg):
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    y = (x[:, :4].prod(1) > 0).long()
    loader = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32, shuffle=True)
    layers = [nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        run.state.best, run.state.best_weights, run.state.waited = float("inf"), None, 0
        for epoch in run.epochs(EPOCHS):
            for start, layer in UNFREEZE.items():
                model[layer].requires_grad_(epoch >= start)
            for inputs, labels in run.batches(loader):
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
            value = evaluate(model, x[320:], y[320:])
            run.log(held_out=value)
            if value < run.state.best:
                run.state.best, run.state.waited = value, 0
                run.state.best_weights = copy.deepcopy(model.state_dict())
            else:
                run.state.waited += 1
                if run.state.waited == PATIENCE:
                    break
    model.load_state_dict(run.state.best_weights)
    print(f"best {run.state.best:.4f}, again {evaluate(model, x[320:], y[320:]):.4f}")


if __name__ == "__main__":
    main()
