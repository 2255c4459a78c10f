"""Train a small classifier whose layers are unfrozen one after the other, with early stopping."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, PATIENCE = 10, 3
UNFREEZE = {2: 2, 4: 0}  # epoch: index of the layer


def evaluate(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


def main():
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    y = (x[:, :4].prod(1) > 0).long()
    loader = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32, shuffle=True)
    layers = [nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
    model = nn.Sequential(*layers)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    best, best_weights, waited = float("inf"), None, 0
    for epoch in range(EPOCHS):
        if epoch in UNFREEZE:
            model[UNFREEZE[epoch]].requires_grad_(True)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch} loss {loss.item():.4f}")
        value = evaluate(model, x[320:], y[320:])
        print(f"epoch {epoch} held out {value:.4f}")
        if value < best:
            best, best_weights, waited = value, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
            if waited == PATIENCE:
                break
    model.load_state_dict(best_weights)
    print(f"best {best:.4f}, again {evaluate(model, x[320:], y[320:]):.4f}")


if __name__ == "__main__":
    main()
