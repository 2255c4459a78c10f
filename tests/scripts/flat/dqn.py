"""DQN with all that a resume needs: the replay buffer, the environment, the target network."""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F

import forge


class Walk:
    """A walk on a line to 1, against the wind."""

    def __init__(self):
        self.x = 0.0

    def step(self, action):
        self.x += (0.1 if action else -0.1) + random.gauss(-0.02, 0.05)
        is_done = abs(self.x) >= 1
        reward = float(self.x >= 1)
        if is_done:
            self.x = 0.0
        return self.x, reward, is_done

    def state_dict(self):
        return {"x": self.x}

    def load_state_dict(self, state):
        self.x = state["x"]


def main(is_buffer_saved):
    random.seed(0)
    torch.manual_seed(0)
    walk = Walk()
    online = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2))
    target = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.RMSprop(online.parameters(), lr=1e-3)
    kept = {"walk": walk, "online": online, "target": target, "optimizer": optimizer}
    with forge.Run({"checkpoint": {"every_steps": 20}}, **kept) as run:
        buffer = run.state.setdefault("buffer", []) if is_buffer_saved else []
        for step in run.steps(120):
            x = walk.x
            with torch.no_grad():
                is_greedy = random.random() > max(0.1, 1 - step / 60)
                q = online(torch.tensor([[x]]))
                action = int(q.argmax()) if is_greedy else random.randrange(2)
            new_x, reward, is_done = walk.step(action)
            buffer.append((x, action, reward, new_x, is_done))
            del buffer[:-500]
            drawn = random.choices(buffer, k=16)
            xs, actions, rewards, new_xs, done = (
                torch.tensor(one, dtype=torch.float32) for one in zip(*drawn, strict=True)
            )
            with torch.no_grad():
                best = target(new_xs[:, None]).amax(1)
            wanted = rewards + 0.95 * best * (1 - done)
            found = online(xs[:, None]).gather(1, actions.long()[:, None])[:, 0]
            loss = F.smooth_l1_loss(found, wanted)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss, reward=reward)
            if step % 20 == 19:
                target.load_state_dict(online.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--forget-buffer", action="store_true")
    main(not parser.parse_args().forget_buffer)
