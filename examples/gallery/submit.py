"""Submit a training with plain submitit, and print what it returns."""

import submitit
import torch

import forge

POLICY = {"checkpoint": {"every_steps": 100}, "requeue": {"max_timeouts": 10}}


def train(lr: float) -> float:
    """Train for 1000 steps, and return the last weight."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with forge.Run(POLICY, config={"lr": lr}, model=model, optimizer=optimizer) as run:
        for _ in run.steps(1000):
            loss = (model(torch.randn(64, 8)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer)
    return model.bias.item()


if __name__ == "__main__":
    executor = submitit.SlurmExecutor("log")
    executor.update_parameters(time=60, signal_delay_s=120)
    job = executor.submit(forge.Checkpointable(train, POLICY), lr=1e-3)
    print(f"submitted {job.job_id}")
    print(f"bias {job.result():.6f}")
