"""Modules with their own loading code, and tensors in them that torch does not load or save."""

import copy

import pytest
import torch
from torch import nn
from updates import a_run

import forge
from forge.errors import CheckpointError, StateMismatch
from forge.state import restoring
from forge.state.registry import StateRegistry


class Expanded(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("cache", tensor, persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("held", tensor)


@pytest.mark.parametrize("kind", [lambda t: nn.Parameter(t, requires_grad=False), nn.Buffer])
def test_expanded_tensors_are_refused_by_name_before_the_first_step(kind):
    """torch saves them and refuses to write to them: such a run could never resume."""
    model = Expanded(torch.ones(1))
    StateRegistry({"m": model}).check_savable()
    model.cache = torch.ones(1).expand(5)
    StateRegistry({"m": model}).check_savable()
    del model.inner.held
    model.inner.held = kind(torch.ones(1).expand(5))
    with pytest.raises(CheckpointError, match=r"^m\.inner\.held is an expanded .* \[5\].*clone"):
        StateRegistry({"m": model}).check_savable()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_refused_by_name_until_it_was_called():
    """Its parameters have no shapes yet, so a resume could not see that they differ."""
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(CheckpointError, match=r"^m\.1: a LazyLinear .*Call the model once"):
        StateRegistry({"m": model}).check_savable()
    model(torch.zeros(1, 2))
    StateRegistry({"m": model}).check_savable()


class Grows(nn.Linear):
    """Has extra state that gets longer during training."""

    def __init__(self):
        super().__init__(1, 1)
        self.seen = []

    def get_extra_state(self):
        return torch.tensor(self.seen)

    def set_extra_state(self, state):
        self.seen = state.tolist()


class Appears(Grows):
    """Has no extra state before the first step."""

    def get_extra_state(self):
        return {"seen": self.seen} if self.seen else None

    def set_extra_state(self, state):
        self.seen = state["seen"] if state else []


class Resizes(nn.Module):
    """As in the observers of torch.ao, the buffer gets as long as there are channels."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def _load_from_state_dict(self, state, prefix, *rest):
        self.seen.resize_(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class ResizesAll(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("seen", torch.zeros(0))

    def load_state_dict(self, state, strict=True):
        self.seen.resize_(state["seen"].shape)
        super().load_state_dict(state, strict)


def quantized():
    """Fake quantization per channel, whose state torch's own classes load."""
    quantization = torch.ao.quantization
    layer = nn.Linear(2, 3)
    layer.qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(nn.Sequential(layer).train())


def use(module):
    if "seen" in dict(module.named_buffers()):
        module.seen.resize_(2).copy_(torch.tensor([1.0, 2.0]))
    elif hasattr(module, "seen"):
        module.seen = [1.0, 2.0]
    else:
        module(torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min")
@pytest.mark.parametrize("kind", [Grows, Appears, Resizes, ResizesAll, quantized])
def test_a_module_that_loads_what_a_new_one_has_not_is_left_to_it(kind):
    """A module can grow during training. A resume has to accept every state that it can load."""
    old, new = kind(), kind()
    use(old)
    saved = copy.deepcopy(StateRegistry({"m": old}).capture())
    live = StateRegistry({"m": nn.ModuleDict({"inner": new})})
    saved["states"]["m"] = {f"inner.{k}": v for k, v in saved["states"]["m"].items()}
    if kind is ResizesAll:  # torch calls it for the outermost module only
        live = StateRegistry({"m": new})
        saved["states"]["m"] = {k[6:]: v for k, v in saved["states"]["m"].items()}
    restoring.load(live, saved)
    assert str(new.state_dict()) == str(old.state_dict())


class TakesAll(nn.Linear):
    def load_state_dict(self, state):
        super().load_state_dict(state, strict=False)


def test_what_a_module_left_out_as_it_loaded_is_named_all_the_same():
    """forge compares after loading, too: nothing silently keeps its initial value."""
    saved = StateRegistry({"m": nn.Linear(3, 1)}).capture()
    saved["states"]["m"]["scale"] = torch.ones(1)
    with pytest.raises(StateMismatch, match=r"m\.scale: float32\[1\] in .*, nothing in the object"):
        restoring.load(StateRegistry({"m": TakesAll(3, 1)}), saved)


class FrozenBackbone(torch.nn.Module):
    """Saves its trained part alone, as scripts with LoRA do."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(2, 3).requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.head = torch.nn.Linear(3, 1)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {key: one for key, one in state.items() if "backbone" not in key}


class WithLoader(FrozenBackbone):
    """The same, and it can load what it saves."""

    def load_state_dict(self, state, strict=False):
        return super().load_state_dict(state, strict=False)


def test_a_module_that_saves_less_than_it_loads_is_refused_at_the_start(tmp_path):
    """It was saved for days, and each resume ended with 74."""
    with (
        pytest.raises(forge.Exit) as exit_,
        a_run(tmp_path, model=FrozenBackbone()),
    ):
        pass
    assert exit_.value.code == 78
    assert "model.backbone.bias, model.backbone.weight" in exit_.value.text


def test_a_module_that_loads_what_it_saves_is_not_refused(tmp_path):
    """Its own load_state_dict, or a hook, decides what it needs."""
    hooked = FrozenBackbone()
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    for number, module in enumerate([WithLoader(), hooked]):
        with a_run(tmp_path / str(number), model=module) as run:
            for _ in run.steps(1):
                pass
        assert run.step == 1
