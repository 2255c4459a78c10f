"""Changes of a model or an optimizer during training: saved and loadable, or refused at once."""

import copy

import pytest
import torch
from nan_trainer import checkpoints, outliving, stop
from rows import each_value
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from updates import a_run

import forge


@pytest.fixture(autouse=True)
def _lives_on():
    with outliving():
        yield


class Model(nn.Module):
    """Two layers, a tied pair, and buffers that change in each call."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        self.encoder, self.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("unset", None)

    def forward(self, x):
        self.scale = self.scale + x.detach().abs().mean()
        hidden = self.body(x / self.scale)
        return self.head(self.decoder(self.encoder(hidden)))


def build():
    torch.manual_seed(1)
    model = Model()
    groups = [{"params": list(model.body.parameters())}, {"params": list(model.head.parameters())}]
    groups.append({"params": list(model.encoder.parameters()), "lr": 0.01})
    return model, torch.optim.Adam(groups, lr=0.1)


def train(directory, change=None, at=3, steps=6, every_steps=2, then=None):
    """The state at the end of a run, after `change` in step `at`."""
    model, optimizer = build()
    policy = {"checkpoint": {"dir": str(directory), "every_steps": every_steps, "every_s": None}}
    with a_run(directory, policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(steps):
            loss = model(torch.randn(3, 2)).square().sum()
            loss.backward()
            run.update(loss, optimizer)
            if change is not None and step == at:
                change(model, optimizer)
                if then is not None:
                    then()
    return str(copy.deepcopy((model.state_dict(), optimizer.state_dict()))), run.resumed_from


def reverse(model, optimizer):
    optimizer.param_groups.reverse()


def move(model, optimizer):
    first, second, _ = optimizer.param_groups
    second["params"].append(first["params"].pop())


def swap(model, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def new_head(model, optimizer):
    model.head = nn.Linear(3, 1)


def smaller_body(model, optimizer):
    model.body.weight = nn.Parameter(model.body.weight[:, :1].clone())


def more(model, optimizer):
    model.extra = nn.Linear(1, 1)


def less(model, optimizer):
    del model.head.bias


def in_float64(model, optimizer):
    model.double()


def grow(model, optimizer):
    model.scale = torch.ones(2)


def appear(model, optimizer):
    model.unset = torch.ones(2)


CHANGES = {
    "groups reversed": (
        reverse,
        "optimizer.param_groups[0]: 2 parameters at the start, 1 now",
    ),
    "moved to another group": (move, "optimizer.param_groups[0]: 2 parameters at the start"),
    "parameters swapped": (swap, "optimizer.param_groups[0][0]: model.body.weight at the start"),
    "a head replaced": (new_head, "param_groups[1][0]: model.head.weight at the start"),
    "a layer pruned": (
        lambda model, _: prune.l1_unstructured(model.body, "weight", amount=1),
        "model.body.weight: float32[3, 2] at the start, nothing now",
    ),
    "a layer cut": (
        smaller_body,
        "model.body.weight: float32[3, 2] at the start, float32[3, 1] now",
    ),
    "a layer added": (more, "model.extra.weight: nothing at the start"),
    "a bias deleted": (less, "model.head.bias: float32[1] at the start, nothing now"),
    "a weight norm": (
        lambda model, _: parametrizations.weight_norm(model.body),
        "model.body.weight: float32[3, 2] at the start, nothing now",
    ),
    "another dtype": (
        in_float64,
        "model.body.weight: float32[3, 2] at the start, float64",
    ),
    "a buffer grown": (grow, "model.scale: float32[] at the start, float32[2] now"),
    "a buffer set": (appear, "model.unset: nothing at the start, float32[2] now"),
}


@pytest.mark.parametrize(
    ("change", "ends_by"), each_value(list(CHANGES), ["the next save", "a stop", "the end"])
)
def test_what_no_start_could_load_is_refused_before_it_is_saved(tmp_path, change, ends_by):
    """Otherwise every later start would end with code 74, or with other bits."""
    act, sentence = CHANGES[change]
    every_steps, at = (100, 5) if ends_by == "the end" else (2, 3)
    then = stop if ends_by == "a stop" else None
    with pytest.raises(forge.Exit) as caught:
        train(tmp_path, act, at=at, every_steps=every_steps, then=then)
    assert caught.value.code == 78
    assert sentence in caught.value.text
    assert checkpoints(tmp_path) == (set() if ends_by == "the end" else {"step_2"})
    assert train(tmp_path)[0] == train(tmp_path / "undisturbed")[0]


def kill(model, optimizer):
    raise RuntimeError("killed")


def kinds_of_models():
    def plain():
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def spectral():
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(2, 4)), nn.Linear(4, 1))

    def old_weight_norm():
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 4)), nn.Linear(4, 1))

    def pruned():
        model = plain()
        prune.l1_unstructured(model[0], "weight", amount=2)
        return model

    def orthogonal():
        return nn.Sequential(parametrizations.orthogonal(nn.Linear(2, 2)), nn.Linear(2, 1))

    def shared_module():
        layer = nn.Linear(2, 2)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(2, 1))

    return {
        one.__name__: one
        for one in (plain, spectral, old_weight_norm, pruned, orthogonal, shared_module)
    }


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("kind", kinds_of_models())
def test_models_that_stay_what_they_are_are_not_refused(tmp_path, kind):
    """Hooks, parametrizations, averages: each start builds the same model."""

    def run_it(directory, until):
        torch.manual_seed(1)
        model = kinds_of_models()[kind]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        stateful = {"model": model, "optimizer": optimizer}
        has_average = kind not in ("old_weight_norm", "pruned")  # AveragedModel copies it
        if has_average:
            stateful["ema"] = AveragedModel(model, use_buffers=True)
        saves = {"every_steps": None if until is None else 1, "every_s": None}
        policy = {"checkpoint": {"dir": str(directory), **saves}}
        with a_run(directory, policy, **stateful) as run:
            for step in run.steps(6):
                loss = model(torch.randn(3, 2)).square().sum()
                loss.backward()
                run.update(loss, optimizer)
                if has_average:
                    stateful["ema"].update_parameters(model)
                if step == until:
                    kill(model, optimizer)
        return str([one.state_dict() for one in stateful.values()])

    for until in (0, 3):
        with pytest.raises(RuntimeError, match="killed"):
            run_it(tmp_path / "job", until)
    assert run_it(tmp_path / "job", None) == run_it(tmp_path / "undisturbed", None)
    assert not parametrize.is_parametrized(nn.Linear(1, 1))
