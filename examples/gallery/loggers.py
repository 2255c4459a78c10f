"""TensorBoard and a CSV file that have each step once, however often the job is killed.

python loggers.py    # kill it whenever you like, and start it again
"""

import torch

import forge


def main() -> None:
    """Learn the sum of eight numbers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy = {"checkpoint": {"dir": "runs/logged", "every_steps": 200}}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        run.log_to(forge.loggers.TensorBoard(), forge.loggers.CSV())
        for _ in run.steps(2000):
            inputs = torch.randn(64, 8)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
    print(f"trained {run.step} steps")


if __name__ == "__main__":
    main()
