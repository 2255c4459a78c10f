"""Train a small GPT on Python's standard library: train_plain.py, made to survive."""

from pathlib import Path
from typing import Any

import hydra
from gpt import build, evaluate, keep, loss_fn, report, sample
from hydra.core.hydra_config import HydraConfig

import forge

# Hydra 1.3 warns without a version_base, and Hydra 1.4 warns of one.
VERSION_BASE = {"version_base": None} if hydra.__version__ < "1.4" else {}


@hydra.main(**VERSION_BASE, config_path="conf", config_name="train")
def main(cfg: Any) -> None:
    """Train, then show what was learned and keep the weights."""
    model, optimizer, schedule, loader, data = build(cfg)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer, schedule=schedule) as run:

        @run.every(cfg.eval_every)
        def held_out(step: int) -> None:
            run.log(held_out=report(step, evaluate(model, data, check_stop=run.check_stop)))

        for _, batch in run.steps(cfg.steps, loader):
            loss = loss_fn(model, batch)
            loss.backward()
            run.update(loss, optimizer, schedule, clip_norm=1.0)
            optimizer.zero_grad(set_to_none=True)
            run.log(loss=loss)
    print(sample(model, data.vocabulary, **cfg.sample))
    keep(model, Path(HydraConfig.get().runtime.output_dir, "weights.pt"))


if __name__ == "__main__":
    main()
