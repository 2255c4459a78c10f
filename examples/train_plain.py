"""Train a small GPT on Python's standard library: a plain PyTorch loop, the twin of train.py."""

from itertools import islice
from pathlib import Path
from typing import Any

import hydra
import torch
from gpt import build, endless, evaluate, keep, loss_fn, report, sample
from hydra.core.hydra_config import HydraConfig

# Hydra 1.3 warns without a version_base, and Hydra 1.4 warns of one.
VERSION_BASE = {"version_base": None} if hydra.__version__ < "1.4" else {}


@hydra.main(**VERSION_BASE, config_path="conf", config_name="plain")
def main(cfg: Any) -> None:
    """Train, then show what was learned and keep the weights."""
    model, optimizer, schedule, loader, data = build(cfg)
    for step, batch in enumerate(islice(endless(loader), cfg.steps)):
        loss = loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % cfg.eval_every == 0:
            report(step + 1, evaluate(model, data))
    print(sample(model, data.vocabulary, **cfg.sample))
    keep(model, Path(HydraConfig.get().runtime.output_dir, "weights.pt"))


if __name__ == "__main__":
    main()
