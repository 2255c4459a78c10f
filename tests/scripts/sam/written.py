"""Train a small classifier with sharpness-aware minimisation on two synthetic rings."""

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

STEPS, EVERY = 100, 20

ConfigStore.instance().store("config", {"defaults": [{"resilience": "default"}, "_self_"]})


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        self.second_step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


@hydra.main(version_base=None, config_name="config")
def main(cfg):
    torch.manual_seed(0)
    x = torch.randn(640, 2)
    y = (x.norm(dim=1) > 1.2).long()
    loader = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:

        @run.every(EVERY)
        def held_out(step):
            with torch.no_grad():
                accuracy = (model(x[512:]).argmax(1) == y[512:]).float().mean()
            run.log(accuracy=accuracy)

        for _, (inputs, labels) in run.steps(STEPS, loader):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.first_step()
            F.cross_entropy(model(inputs), labels).backward()
            run.update(loss, optimizer)
            run.log(loss=loss)


if __name__ == "__main__":
    main()
