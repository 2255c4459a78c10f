"""A loop that forge does not own: a trainer calls a function between two steps."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import forge


class Trainer:
    """The trainer of another library, with its own counters and its own loop."""

    def __init__(self, between_steps) -> None:
        self.step = self.epoch = 0
        self.between_steps = between_steps

    def state_dict(self) -> dict:
        """The counters."""
        return {"step": self.step, "epoch": self.epoch}

    def load_state_dict(self, state: dict) -> None:
        """Continue with these counters."""
        self.step, self.epoch = state["step"], state["epoch"]

    def fit(self, model, optimizer, loader, epochs: int) -> None:
        """Train, and call `between_steps` after each step."""
        while self.epoch < epochs:
            for inputs, targets in loader:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.step += 1
                self.between_steps()
            self.epoch += 1


def main() -> None:
    """Learn the sum of eight numbers, with dropout."""
    torch.manual_seed(0)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(1, True))
    loader = forge.data.resumable(DataLoader(data, 64, shuffle=True))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def between_steps() -> None:
        run.boundary(trainer.step, epoch=trainer.epoch, taken=trainer.step)

    trainer = Trainer(between_steps)
    objects = {
        "model": model,
        "optimizer": optimizer,
        "trainer": trainer,
        "loader": loader,
    }
    policy = {"checkpoint": {"dir": "runs/own_loop", "every_steps": 100}}
    with forge.Run(policy, **objects) as run:
        if not run.begin().is_finished:
            trainer.fit(model, optimizer, loader, epochs=5)
            run.end_loop()
    print(f"{trainer.step} steps, bias {model[2].bias.item():.4f}")


if __name__ == "__main__":
    main()
