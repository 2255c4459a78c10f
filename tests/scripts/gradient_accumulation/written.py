"""Train a small classifier with accumulated gradients and a moving average of its weights."""

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import forge

STEPS, ACCUMULATE, EVERY = 60, 4, 15

ConfigStore.instance().store("config", {"defaults": [{"resilience": "default"}, "_self_"]})


@hydra.main(version_base=None, config_name="config")
def main(cfg):
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x[:768], y[:768]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer, schedule=schedule) as run:
        run.state.ema = ema

        @run.every(EVERY * ACCUMULATE)
        def held_out(step):
            ema.eval()
            with torch.no_grad():
                accuracy = (ema(x[768:]).argmax(1) == y[768:]).float().mean()
            run.log(accuracy=accuracy)

        for micro, (inputs, labels) in run.steps(STEPS * ACCUMULATE, loader):
            loss = F.cross_entropy(model(inputs), labels) / ACCUMULATE
            loss.backward()
            if (micro + 1) % ACCUMULATE:
                continue
            run.update(loss, optimizer, schedule, clip_norm=1.0)
            ema.update_parameters(model)
            run.log(loss=loss * ACCUMULATE)


if __name__ == "__main__":
    main()
