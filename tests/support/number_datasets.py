"""Datasets for tests: numbers with and without draws, and a stream of them."""

import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset):
    """0 … size-1; counts what is read."""

    def __init__(self, size, draws=False):
        self.size, self.draws, self.read = size, draws, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor(float(index)) + (torch.rand(()) if self.draws else 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))
