"""Train a recurrent predictor of noisy waves by truncated backpropagation through time."""

import torch
from torch import nn
from torch.nn import functional as F

import forge

STEPS, CHUNK = 60, 20


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x, hidden):
        out, hidden = self.lstm(x, hidden)
        return self.head(out), hidden


def main():
    torch.manual_seed(0)
    time = torch.arange(24 * CHUNK + 1) * torch.empty(8, 1).uniform_(0.05, 0.3)
    waves = (time.sin() + 0.1 * torch.randn_like(time)).unsqueeze(-1)
    starts = range(0, 24 * CHUNK, CHUNK)
    chunks = [(waves[:, s : s + CHUNK], waves[:, s + 1 : s + CHUNK + 1]) for s in starts]
    model = Predictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
        run.state["hidden"] = None
        for step, (x, y) in run.steps(STEPS, chunks):
            if step % len(chunks) == 0:
                run.state["hidden"] = None
            out, hidden = model(x, run.state["hidden"])
            run.state["hidden"] = tuple(h.detach() for h in hidden)
            loss = F.mse_loss(out, y)
            loss.backward()
            run.update(loss, optimizer, clip_norm=1.0)
            run.log(loss=loss)
    with torch.no_grad():
        error = F.mse_loss(model(waves[:, :-1], None)[0], waves[:, 1:])
    print(f"error over the whole waves {error:.4f}")


if __name__ == "__main__":
    main()
