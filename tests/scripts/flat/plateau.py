"""Fine-tuning with ReduceLROnPlateau; the best loss so far in a local variable, and patience."""

import argparse

import torch
from torch import nn

import forge


def fresh():
    return {"loss": float("inf"), "num_bad": 0}


def main(is_best_saved):
    torch.manual_seed(0)
    held_out = torch.randn(64, 6)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with forge.Run({"checkpoint": {"every_steps": 10}}, **objects) as run:
        best = run.state.setdefault("best", fresh()) if is_best_saved else fresh()

        @run.every(4)
        def evaluate(_):
            with torch.no_grad():
                now = (model(held_out) - held_out.sum(1, keepdim=True).abs()).square().mean()
            schedule.step(now)
            best["num_bad"] = 0 if now < best["loss"] else best["num_bad"] + 1
            best["loss"] = min(best["loss"], float(now))
            run.log(held_out=now, best=best["loss"], num_bad=best["num_bad"])

        for _ in run.steps(80):
            x = torch.randn(8, 6)
            loss = (model(x) - x.sum(1, keepdim=True).abs()).square().mean()
            loss.backward()
            run.update(loss, optimizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--forget-best", action="store_true")
    main(not parser.parse_args().forget_best)
