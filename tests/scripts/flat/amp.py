"""Mixed precision with a GradScaler, accumulated over two batches, on the CPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge

torch.manual_seed(0)
generator = torch.Generator().manual_seed(3)
x = torch.randn(128, 16, generator=generator)
data = TensorDataset(x, x[:, :4].softmax(1).argmax(1))
loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(4))
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)

with forge.Run(
    {"checkpoint": {"every_steps": 7}}, model=model, optimizer=optimizer, scaler=scaler
) as run:
    for step, (inputs, labels) in run.steps(60, loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss / 2).backward()
        if step % 2:
            run.update(loss, optimizer, scaler=scaler, clip_norm=1.0)
        run.log(loss=loss, scale=scaler.get_scale())
