"""Train a small policy by REINFORCE with a running baseline to walk to a goal on a line."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

STEPS, EPISODES, LENGTH, GOAL = 60, 16, 12, 5.0


def play(policy, rng):
    position = torch.tensor(rng.integers(-3, 4, EPISODES), dtype=torch.float32)
    logps, rewards = [], []
    for _ in range(LENGTH):
        choice = Categorical(logits=policy(position.unsqueeze(1) / GOAL))
        action = choice.sample()
        logps.append(choice.log_prob(action))
        slip = torch.tensor(rng.random(EPISODES) < 0.1)
        position = position + torch.where(slip, 0, 2 * action - 1)
        rewards.append(-(position - GOAL).abs() / GOAL)
    return torch.stack(logps).sum(0), torch.stack(rewards).sum(0)


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policy = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    baseline = 0.0
    for step in range(STEPS):
        logp, reward = play(policy, rng)
        loss = -(logp * (reward - baseline)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        print(f"step {step + 1} loss {loss.item():.4f} reward {reward.mean():.4f}")
    print(f"baseline at the end {baseline:.4f}")


if __name__ == "__main__":
    main()
