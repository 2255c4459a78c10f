"""A Hydra app as a user would write it; copied into a fresh folder by the tests."""

import os
import signal
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig

import forge


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg):
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    output = Path(HydraConfig.get().runtime.output_dir)
    with (output / "seen.txt").open("a") as file:
        file.write(f"lr={cfg.lr} name={cfg.name} stamp={cfg.stamp}\n")
    if cfg.signal_in == "building" and not (output / "weights.pt").exists():
        os.kill(os.getpid(), signal.SIGTERM)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for step in run.steps(cfg.steps):
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            if step == cfg.signal_in and run.resumed_from is None:
                os.kill(os.getpid(), signal.SIGTERM)
    torch.save(model.state_dict(), output / "weights.pt")


if __name__ == "__main__":
    main()
