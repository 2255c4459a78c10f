"""What a step changes before its optimizer steps is seen, or never taken for the boundary."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from forge.state.registry import StateRegistry
from forge.training.emergency.step_changes import StepChanges


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.two(self.norm(self.one(x)) * self.scale)


class Trained:
    """A model in DDP after three steps, at a boundary."""

    def __init__(self, net=None, rate=0.1, **others):
        self.net = net or Net()
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.schedule = lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(self.optimizer), lr_scheduler.ExponentialLR(self.optimizer, 0.9)]
        )
        objects = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.changes = StepChanges(StateRegistry(objects | others))
        self.never = self.changes.problem()
        if self.never:
            return
        self.changes.listen()
        for _ in range(3):
            self.changes.begin_step()
            self.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.changes.begin_step()

    def backward(self):
        self.model(torch.ones(2, 4)).sum().backward()


def test_a_step_that_has_come_to_its_backward_pass_has_changed_nothing():
    """Where ranks stand when one of them dies: then the boundary can be saved."""
    trained = Trained()
    assert not trained.never
    trained.backward()
    assert not trained.changes.changed()


def assign(trained):
    trained.net.one.weight.data = torch.zeros(4, 4)


def in_place(trained):
    with torch.no_grad():
        trained.net.one.weight.mul_(2)


def state(trained):
    trained.optimizer.state[trained.net.one.weight]["exp_avg"].mul_(0.5)


def replace(trained):
    trained.net.two = nn.Linear(4, 1)


def twice(trained):
    trained.backward()
    trained.net.one.weight.data.add_(1)  # as SAM does between its two passes
    trained.backward()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda t: t.optimizer.step(), "an optimizer had begun its step"),
        (lambda t: t.schedule.step(), "a schedule had changed"),
        (lambda t: t.net.scale.data.mul_(0.9), "buffers change while training"),
        (lambda t: t.model.register_comm_hook(None, default_hooks.fp16_compress_hook), "a comm"),
        (in_place, "a parameter, an optimizer"),
        (assign, "a parameter, an optimizer"),
        (state, "a parameter, an optimizer"),
        (replace, "other parts than at the start"),
        (twice, "had run more than once"),
    ],
    ids=[
        "optimizer",
        "schedule",
        "buffer",
        "hook",
        "in_place",
        "assign",
        "state",
        "replace",
        "twice",
    ],
)
def test_what_a_step_has_changed_is_seen(act, reason):
    """Half a step in a checkpoint would be another training, and nobody would know."""
    trained = Trained()
    act(trained)
    assert reason in trained.changes.changed()


def test_gradients_over_the_boundary_are_seen():
    """By now they may be those of the next step."""
    trained = Trained()
    trained.backward()
    trained.changes.begin_step()
    assert "gradients were kept over the boundary" in trained.changes.changed()


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_what_loops_set_before_they_compute_is_put_back(rate):
    """A rate that each step multiplies would else be multiplied twice."""
    trained = Trained(rate=rate)
    (group,) = trained.optimizer.param_groups
    before = float(group["lr"])
    group["lr"] *= 0.5
    group["seen"] = 3
    trained.model.eval()
    assert not trained.changes.changed()
    trained.changes.put_back()
    assert float(group["lr"]) == before
    assert "seen" not in group
    assert trained.net.training


class Counting(Net):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, found):
        pass


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (lambda: {"scaler": torch.amp.GradScaler("cpu")}, "scaler, a GradScaler, may change"),
        (lambda: {"average": Net()}, "average, a Net, is not in DistributedDataParallel"),
        (lambda: {"own": Own(Net().parameters())}, "own, a Own, is none of torch's own"),
        (
            lambda: {"stray": torch.optim.SGD([torch.ones(1, requires_grad=True)])},
            "an optimizer has parameters outside the models",
        ),
        (lambda: {"net": Counting()}, "has a module with a way of its own"),
    ],
    ids=["scaler", "average", "own", "stray", "extra"],
)
def test_what_cannot_be_seen_is_refused_from_the_start(others, reason):
    """A scaler moves its scale, an average follows, and no hook says so."""
    assert reason in Trained(**others()).never
