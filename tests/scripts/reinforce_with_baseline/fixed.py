"""Train a small policy by REINFORCE with a running baseline to walk to a goal on a line."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import forge

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
    policy = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=policy, optimizer=optimizer) as run:
        run.state["rng"] = np.random.default_rng(0)
        run.state["baseline"] = 0.0
        for _ in run.steps(STEPS):
            logp, reward = play(policy, run.state["rng"])
            loss = -(logp * (reward - run.state["baseline"])).mean()
            loss.backward()
            run.update(loss, optimizer)
            run.state["baseline"] = 0.9 * run.state["baseline"] + 0.1 * reward.mean().item()
            run.log(loss=loss, reward=reward.mean())
    print(f"baseline at the end {run.state['baseline']:.4f}")


if __name__ == "__main__":
    main()
