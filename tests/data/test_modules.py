"""Modules and batches of unusual kinds: what a stop inside an evaluation has to look at."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import forge
from forge.state.fingerprint import Looks

SCRIPT = "modules.py"


@pytest.mark.parametrize("kind", ["buffer", "tensor", "list", "number"])
def test_an_evaluation_that_changes_what_is_saved_is_not_repeated(kind, stop_and_compare):
    """A buffer that another takes the place of, and whatever get_extra_state returns."""
    job = stop_and_compare("poll 5", SCRIPT, loop="counts", kind=kind, when="evaluation")
    assert job.steps_repeated == [0]


@pytest.mark.parametrize("kind", ["buffer", "tensor", "list", "number"])
def test_what_a_repeated_step_changes_is_put_back(kind, stop_and_compare):
    """It is loaded twice: what a module keeps of the first load is not what the second gives."""
    job = stop_and_compare("poll 5", SCRIPT, loop="counts", kind=kind, when="training")
    assert job.steps_repeated == [1]


REPEATED = {
    "needs grad": 1,
    "computed": 0,
    "made in inference mode": 0,
    "namedtuple": 0,
    "array": 1,
}
"""How a batch is made -> whether its step is repeated, or ends before the stop."""


@pytest.mark.parametrize("kind", REPEATED)
def test_a_batch_is_given_again_as_it_was_or_not_at_all(kind, stop_and_compare):
    """With gradients asked for, and without what the loop has written to it."""
    job = stop_and_compare("poll 5", SCRIPT, loop="batches", kind=kind)
    assert job.steps_repeated == [REPEATED[kind]]


class Holder(torch.nn.Module):
    """A layer, and a buffer of any kind."""

    def __init__(self, buffer):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("held", buffer)


EYE = torch.eye(4)
BUFFERS = {
    "COO": lambda: EYE.to_sparse(),
    "float8": lambda: EYE.to(torch.float8_e5m2),
    "conjugate": lambda: (EYE * 1j).conj(),
    "empty": lambda: torch.empty(0),
    "int": lambda: torch.arange(4),
}


def train(directory, model, loader=None, step_s=0.0):
    """Four steps to the end."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    teacher = torch.nn.Linear(1, 1)
    policy = {"checkpoint": {"dir": str(directory)}}
    with forge.Run(policy, model=model, optimizer=optimizer, teacher=teacher) as run:
        for item in run.steps(4, loader):
            batch = torch.ones(2, 4) if loader is None else item[1].clone()
            time.sleep(step_s)
            loss = model.layer(batch).mean()
            loss.backward()
            run.update(loss, optimizer)
    assert (directory / "step_4").is_dir()


@pytest.mark.filterwarnings("ignore:Sparse ... tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("step_s", [0.0, 0.03], ids=["fast", "slow"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_model_with_any_buffer_that_can_be_saved_trains_to_its_end(kind, step_s, tmp_path):
    """It must not be lost after its last step, for what only a stop would have needed."""
    train(tmp_path / "checkpoints", Holder(BUFFERS[kind]()), step_s=step_s)


@pytest.mark.filterwarnings("ignore:Sparse ... tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_change_of_any_buffer_shows(kind):
    """In its place, through its version, or through `.data`, which counts nothing."""
    model = Holder(BUFFERS[kind]())
    looks = Looks([model])
    before = looks.look(True)
    assert before.is_same(looks.look(True))
    model.held = BUFFERS[kind]()
    after = looks.look(True)
    assert not before.is_same(after)
    if model.held.numel() and not kind.startswith("one"):
        data = model.held.data
        if data.layout is not torch.strided:
            data = data._values() if kind == "COO" else data.values()
        data.zero_()
        assert not after.is_same(looks.look(True))


@pytest.mark.parametrize(
    "make", [lambda: EYE.to_mkldnn(), lambda: torch.nested.nested_tensor([EYE, EYE])]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_buffer_that_cannot_be_saved_is_refused_by_its_path(make, tmp_path):
    """At the start, in the words of the one who looks at it to save it."""
    with pytest.raises(forge.ForgeError, match=r"model\.held: a .* cannot be saved"):
        train(tmp_path / "checkpoints", Holder(make()))


class MadeInInferenceMode(Dataset):
    def __len__(self):
        return 8

    @torch.inference_mode()
    def __getitem__(self, index):
        return torch.ones(4) * index


def test_batches_and_modules_made_in_inference_mode_are_trained_with(tmp_path):
    """They work in a plain loop; they count no writes, so a stop comes at a step's end."""
    train(tmp_path / "one", Holder(EYE), DataLoader(MadeInInferenceMode(), batch_size=None))
    with torch.inference_mode():
        frozen = torch.nn.Linear(4, 1).requires_grad_(False)
    model = Holder(EYE)
    model.teacher = frozen
    train(tmp_path / "other", model, step_s=0.03)


class Extra(torch.nn.Module):
    """Saves what it is told to."""

    extra = None

    def get_extra_state(self):
        return {"extra": self.extra}


@pytest.mark.parametrize(
    "extra", [1, [1], torch.ones(20), {"a": (1.0, torch.tensor(float("nan")))}]
)
def test_what_a_module_saves_besides_is_compared_by_value(extra):
    """Nothing counts what is written to it; where it stays the same a stop stays possible."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Extra())
    model[1].extra = extra
    looks = Looks([model])
    before = looks.look(True)
    assert before.is_same(looks.look(True))
    assert not before.is_same(looks.look(False))
    model[1].extra = [1, 2]
    assert not before.is_same(looks.look(True))
    model[1].extra = extra
    assert before.is_same(looks.look(True))
    if isinstance(extra, torch.Tensor):
        extra.data[13] = 7.0
        assert not before.is_same(looks.look(True))
