"""Self-distillation: a registered teacher is given the weights of the student in each epoch."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

TEMPERATURE = 2.0


def main():
    torch.manual_seed(0)
    x = torch.randn(96, 10)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 8, shuffle=True)
    student = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    objects = {"student": student, "teacher": teacher, "optimizer": optimizer}
    with forge.Run({"checkpoint": {"every_steps": 10}}, **objects) as run:
        for _ in run.epochs(5):
            teacher.load_state_dict(student.state_dict())
            for _, (inputs, labels) in run.batches(loader):
                logits = student(inputs)
                soft = F.softmax(teacher(inputs) / TEMPERATURE, dim=1)
                distance = F.kl_div(
                    F.log_softmax(logits / TEMPERATURE, dim=1), soft, reduction="batchmean"
                )
                loss = F.cross_entropy(logits, labels) + distance * TEMPERATURE**2
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)


if __name__ == "__main__":
    main()
