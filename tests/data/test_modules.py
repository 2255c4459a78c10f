"""Modules and batches of unusual kinds are trained to the end."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import forge


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


def train(directory, model, loader=None):
    """Four steps to the end; where the finished state is."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    teacher = torch.nn.Linear(1, 1)
    policy = {"checkpoint": {"dir": str(directory)}}
    with forge.Run(policy, model=model, optimizer=optimizer, teacher=teacher) as run:
        for item in run.steps(4, loader):
            batch = torch.ones(2, 4) if loader is None else item[1].clone()
            loss = model.layer(batch).mean()
            loss.backward()
            run.update(loss, optimizer)
    return directory / "step_4"


@pytest.mark.filterwarnings("ignore:Sparse ... tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_model_with_any_buffer_that_can_be_saved_trains_to_its_end(kind, tmp_path):
    """Saved and compared, whatever its layout."""
    assert train(tmp_path / "checkpoints", Holder(BUFFERS[kind]())).is_dir()


@pytest.mark.parametrize(
    "make", [lambda: EYE.to_mkldnn(), lambda: torch.nested.nested_tensor([EYE, EYE])]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_buffer_that_cannot_be_saved_is_refused_by_its_path(make, tmp_path):
    """At the start, in the words of the one who looks at it to save it."""
    with pytest.raises(
        forge.Exit, match=r"model\.held: this version of forge cannot save a "
    ) as refused:
        train(tmp_path / "checkpoints", Holder(make()))
    assert refused.value.code == forge.ExitCode.BAD_CONFIG


class MadeInInferenceMode(Dataset):
    def __len__(self):
        return 8

    @torch.inference_mode()
    def __getitem__(self, index):
        return torch.ones(4) * index


def test_batches_and_modules_made_in_inference_mode_are_trained_with(tmp_path):
    """They work in a plain loop."""
    loader = DataLoader(MadeInInferenceMode(), batch_size=None)
    assert train(tmp_path / "one", Holder(EYE), loader).is_dir()
    with torch.inference_mode():
        frozen = torch.nn.Linear(4, 1).requires_grad_(False)
    model = Holder(EYE)
    model.teacher = frozen
    assert train(tmp_path / "other", model).is_dir()
