"""Train a small agent with proximal policy optimisation to hold point masses at the origin."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import forge

ITERATIONS, HORIZON, ENVS, EPOCHS, MINIBATCH, GAMMA, CLIP = 10, 32, 8, 3, 128, 0.95, 0.2


class Masses:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.points = self.rng.uniform(-1, 1, (ENVS, 2))

    def observe(self):
        return torch.tensor(self.points, dtype=torch.float32)

    def step(self, action):
        self.points[:, 1] += 0.2 * (2 * action.numpy() - 1)
        self.points[:, 0] += 0.2 * self.points[:, 1]
        reward, done = -np.abs(self.points[:, 0]), np.abs(self.points[:, 0]) > 2
        self.points[done] = self.rng.uniform(-1, 1, (done.sum(), 2))
        return torch.tensor(reward - 5 * done, dtype=torch.float32), torch.tensor(done).float()

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "points": self.points.copy()}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.points = state["points"].copy()


def rollout(env, policy, value):
    states, actions, logps, rewards, dones = [], [], [], [], []
    with torch.no_grad():
        for _ in range(HORIZON):
            states.append(env.observe())
            choice = Categorical(logits=policy(states[-1]))
            actions.append(choice.sample())
            logps.append(choice.log_prob(actions[-1]))
            reward, done = env.step(actions[-1])
            rewards.append(reward)
            dones.append(done)
        total, returns = value(env.observe()).squeeze(1), []
        for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
            total = reward + GAMMA * total * (1 - done)
            returns.insert(0, total)
    reward = torch.stack(rewards).mean()
    return *(torch.cat(part) for part in (states, actions, logps, returns)), reward


def ppo_loss(policy, value, states, actions, logps, returns):
    choice, values = Categorical(logits=policy(states)), value(states).squeeze(1)
    gain, ratio = (returns - values).detach(), (choice.log_prob(actions) - logps).exp()
    surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    return -surrogate + 0.5 * (returns - values).pow(2).mean() - 0.01 * choice.entropy().mean()


def main():
    torch.manual_seed(0)
    env = Masses(seed=0)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    value = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=5e-3)
    saved = {"policy": policy, "value": value, "optimizer": optimizer, "env": env}
    with forge.Run({"checkpoint": {"every_steps": 2}}, **saved) as run:
        for _ in run.steps(ITERATIONS):
            *data, reward = rollout(env, policy, value)
            for _ in range(EPOCHS):
                for index in torch.randperm(HORIZON * ENVS).split(MINIBATCH):
                    loss = ppo_loss(policy, value, *(part[index] for part in data))
                    loss.backward()
                    run.update(loss, optimizer, clip_norm=0.5)
                    run.log(loss=loss)
            run.log(reward=reward)


if __name__ == "__main__":
    main()
