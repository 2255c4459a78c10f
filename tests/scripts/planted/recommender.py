"""Trains a recommender on what it saw before; the agent keeps that to itself, in `memory`."""

import random
import sys
from collections import deque

import torch
from torch import nn

import forge


class Agent:
    def __init__(self, num_arms):
        self.num_arms = num_arms
        self.net = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, num_arms))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.memory = deque(maxlen=100)

    def state_dict(self):
        return {"memory": [list(one) for one in self.memory]}

    def load_state_dict(self, state):
        self.memory = deque((tuple(one) for one in state["memory"]), maxlen=100)

    def act(self, context):
        if random.random() < 0.2:
            return random.randrange(self.num_arms)
        with torch.no_grad():
            return int(self.net(torch.tensor(context)).argmax())

    def loss(self, size):
        drawn = random.choices(self.memory, k=size)
        contexts, arms, rewards = (torch.tensor(one) for one in zip(*drawn, strict=True))
        found = self.net(contexts).gather(1, arms[:, None])[:, 0]
        return nn.functional.smooth_l1_loss(found, rewards)


random.seed(10)
torch.manual_seed(10)
agent = Agent(num_arms=4)
kept = {"net": agent.net, "optimizer": agent.optimizer}
if "--fixed" in sys.argv:
    kept["agent"] = agent
with forge.Run({"checkpoint": {"every_steps": 12}}, **kept) as run:
    for _ in run.steps(60):
        context = [random.gauss(0, 1) for _ in range(3)]
        arm = agent.act(context)
        reward = context[arm % 3] * (1 if arm < 3 else -1) + random.gauss(0, 0.1)
        agent.memory.append((context, arm, reward))
        loss = agent.loss(16)
        loss.backward()
        run.update(loss, agent.optimizer)
        run.log(loss=loss, reward=reward)
