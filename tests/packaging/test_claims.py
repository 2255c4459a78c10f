"""What README.md and docs/decisions say of others: true of the versions that are installed."""

import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader

import forge
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig


def flip_a_bit(path, where):
    raw = bytearray(path.read_bytes())
    raw[where] ^= 0x10
    path.write_bytes(raw)


def test_torch_load_reads_a_flipped_bit_in_silence_and_forge_passes_it_over(tmp_path):
    """Disks and networks do that; a resume must not train on from it."""
    tensor = torch.arange(4096.0)
    torch.save({"weight": tensor}, tmp_path / "weights.pt")
    where = (tmp_path / "weights.pt").read_bytes().index(tensor.numpy().tobytes()) + 8000
    flip_a_bit(tmp_path / "weights.pt", where)
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)["weight"]
    assert (loaded != tensor).sum() == 1

    store = Store(tmp_path / "checkpoints", CheckpointConfig())
    try:
        for step in (1, 2):
            store.commit(store.snapshot(step, {"weight": tensor}, copy=False))
        newest = tmp_path / "checkpoints" / "step_2" / "tensors_rank00000.safetensors"
        flip_a_bit(newest, newest.stat().st_size - 8000)
        found = store.newest()
        assert found is not None
        assert found.path.name == "step_1"
        assert torch.equal(found.state["weight"], tensor)
        assert len(store.passed_over) == 1
        assert "step_2" in store.passed_over[0]
    finally:
        store.close()


def test_checkpoints_can_be_read_by_safetensors(tmp_path):
    """docs/decisions/0004: other tools can look at the tensors."""
    store = Store(tmp_path, CheckpointConfig())
    try:
        path = store.commit(store.snapshot(1, {"weight": torch.arange(3.0)}, copy=False))
        found = safetensors.torch.load_file(path / "tensors_rank00000.safetensors")
        assert [value.tolist() for value in found.values()] == [[0.0, 1.0, 2.0]]
    finally:
        store.close()


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index + torch.rand(())


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_stateful_dataloader_does_not_resume_its_workers_draws(tmp_path):
    """Why forge names it at the start, and why `forge.data.seeded` is there."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def third_batch(dataset, resumes):
        torch.manual_seed(0)
        loader = stateful.StatefulDataLoader(dataset, batch_size=4, num_workers=1)
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        if resumes:
            state = loader.state_dict()
            loader = stateful.StatefulDataLoader(dataset, batch_size=4, num_workers=1)
            loader.load_state_dict(state)
            iterator = iter(loader)
        return next(iterator)

    assert not torch.equal(third_batch(Noise(), False), third_batch(Noise(), True))
    seeded = forge.data.seeded(Noise(), 0)
    assert torch.equal(third_batch(seeded, False), third_batch(seeded, True))


def test_making_an_iterator_draws():
    """docs/decisions/0005: the random state is put back after the loader's place."""
    before = torch.get_rng_state()
    iter(DataLoader(range(4)))
    assert not torch.equal(torch.get_rng_state(), before)
