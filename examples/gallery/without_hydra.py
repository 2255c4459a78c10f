"""argparse, and no Hydra: `python without_hydra.py --name first --lr 3e-3`."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import forge


def arguments() -> argparse.Namespace:
    """The settings of this job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="first", help="a directory below runs/")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Learn the sum of eight numbers."""
    args = arguments()
    torch.manual_seed(args.seed)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=args.workers)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    policy = {"checkpoint": {"dir": f"runs/{args.name}", "every_steps": 200}}
    # The same job, whatever the number of workers: they do not change the results.
    config = {key: value for key, value in vars(args).items() if key != "workers"}
    with forge.Run(policy, config=config, model=model, optimizer=optimizer) as run:
        for step, (inputs, targets) in run.steps(args.steps, loader):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
            if step % 500 == 0:
                print(f"step {step}: loss {loss.item():.6f}")
    print(f"trained {run.step} steps")


if __name__ == "__main__":
    main()
