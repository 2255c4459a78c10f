"""DistributedDataParallel without Hydra: `torchrun --nproc-per-node=2 ddp.py`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import forge

EPOCHS = 5
POLICY = {"checkpoint": {"dir": "ddp_checkpoints", "every_steps": 50}}


def main() -> None:
    """Learn the sum of eight numbers on all ranks together."""
    world = forge.distributed.init()
    torch.manual_seed(0)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with forge.Run(POLICY, config={"epochs": EPOCHS}, model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for _, (inputs, targets) in run.batches(loader):
                inputs, targets = inputs.to(world.device), targets.to(world.device)
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                run.update(loss, optimizer, clip_norm=1.0)
                run.log(loss=loss)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
