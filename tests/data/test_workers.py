"""DataLoader workers of a run, and what is left of them in the user's loader."""

import torch
from torch.utils.data import DataLoader

from forge.data.workers import iter_with_blocked_signals


def begin(worker_id):
    """The user's own `worker_init_fn`."""
    torch.utils.data.get_worker_info().dataset.offset = 10


class Numbers(torch.utils.data.Dataset):
    offset = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.offset + index


def test_the_loader_keeps_its_own_worker_init_fn():
    """Whoever iterates it without forge, or pickles it, must not find forge's in its place."""
    loader = DataLoader(Numbers(), num_workers=1, worker_init_fn=begin)
    for _ in range(2):
        assert [int(one) for one in iter_with_blocked_signals(loader)] == [10, 11, 12, 13]
        assert loader.worker_init_fn is begin
