"""Trains a policy by its rewards, less their running mean, which a closure keeps as `baseline`."""

import sys

import torch
from torch import nn

import forge

FIXED = "--fixed" in sys.argv


def advantages(run):
    baseline = run.state.get("baseline", 0.0) if FIXED else 0.0

    def advantage(rewards):
        nonlocal baseline
        centred = rewards - baseline
        baseline += 0.1 * (rewards.mean().item() - baseline)
        if FIXED:
            run.state["baseline"] = baseline
        return centred

    return advantage


def main():
    torch.manual_seed(14)
    worth = torch.linspace(1, 3, 6)
    policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 6))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with forge.Run({"checkpoint": {"every_steps": 10}}, policy=policy, optimizer=optimizer) as run:
        advantage = advantages(run)
        for _ in run.steps(60):
            chosen = torch.distributions.Categorical(logits=policy(torch.randn(32, 2)))
            arms = chosen.sample()
            rewards = worth[arms] + 0.3 * torch.randn(32)
            loss = -(chosen.log_prob(arms) * advantage(rewards)).mean()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss, reward=rewards.mean())


if __name__ == "__main__":
    main()
