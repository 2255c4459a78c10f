"""A GAN: two optimizers in one step, each with its zero_grad where the plain script has it."""

import torch
from torch import nn

import forge

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt_maker = torch.optim.Adam(maker.parameters(), 1e-2)
opt_judge = torch.optim.Adam(judge.parameters(), 1e-2)
bce = nn.functional.binary_cross_entropy_with_logits
real, fake = torch.ones(32, 1), torch.zeros(32, 1)
policy = {"checkpoint": {"dir": "gan", "every_steps": 20}}
objects = {"maker": maker, "judge": judge, "opt_maker": opt_maker, "opt_judge": opt_judge}
with forge.Run(policy, **objects) as run:
    for _ in run.steps(100):
        data, made = torch.randn(32, 2) + 2, maker(torch.randn(32, 4))
        opt_judge.zero_grad()  # also what maker_loss.backward() has left in the judge
        judge_loss = bce(judge(data), real) + bce(judge(made.detach()), fake)
        judge_loss.backward()
        run.update(judge_loss, opt_judge)
        opt_maker.zero_grad()
        maker_loss = bce(judge(made), real)
        maker_loss.backward()
        run.update(maker_loss, opt_maker)
print("bias", maker[2].bias.tolist())
