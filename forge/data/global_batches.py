"""One order of batches for a whole job, whatever its number of ranks.

    epoch      a permutation that follows from (seed, epoch): `DistributedSampler`'s
    batch k    the k-th `global_batch_size` samples of it, on all ranks together
    rank r     the r-th part of that: the parts in the order of the ranks are the batch

The parts are contiguous, so that what all ranks have, put one after the other, is what a single
rank has. `DistributedSampler` deals the samples out one by one instead, and fills an epoch up to a
multiple of its ranks, so that its last batch depends on how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from forge.errors import ConfigError
from forge.group import start


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of all ranks together, of which each rank gets an equal part.

    `DataLoader(dataset, batch_sampler=forge.data.GlobalBatchSampler(dataset, 256))`: step k sees
    the same samples on 1, 2 or 8 ranks, and a job that is resumed with another number of ranks
    continues after the same sample. `run.steps` and `run.batches` call `set_epoch`.

    Every rank has the same number of batches, all of the same size. Where `global_batch_size` does
    not divide the samples, the last batch is left out with `drop_last`; without, it is filled up
    with the first samples of the epoch.

    Args:
        dataset: What has a length; it is not read.
        global_batch_size: Samples in a step of all ranks together.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the orders; the same on every rank.
        drop_last: Whether to leave an incomplete batch out.
        num_replicas: Ranks that share the batches; None: those of torch.distributed, else 1.
        rank: Which of them this is; None: as torch.distributed says.
    Raises:
        ConfigError: Where the ranks cannot share a batch equally, or do not know each other yet.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        what = "This GlobalBatchSampler"
        if num_replicas is None and rank is None:
            start.check_met("before the sampler is made, or pass it num_replicas and rank", what)
        own_rank, size = start.place()
        num_replicas = size if num_replicas is None else num_replicas
        rank = own_rank if rank is None else rank
        problems = _problems(global_batch_size, num_replicas, rank)
        if problems:
            raise ConfigError(problems, what)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.batch_size = global_batch_size // num_replicas
        """Samples in a batch of one rank."""
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the order of this epoch from now on.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        num_samples, first = len(self.dataset), self.rank * self.batch_size
        order = self._order(num_samples)
        if not self.drop_last:
            num_missing = -num_samples % self.global_batch_size
            order += list(itertools.islice(itertools.cycle(order), num_missing))
        for k in range(len(self)):
            begin = k * self.global_batch_size + first
            yield order[begin : begin + self.batch_size]

    def _order(self, num_samples: int) -> list[int]:
        if not self.shuffle:
            return list(range(num_samples))
        # On the CPU wherever torch's default device is: the order is the same on all machines.
        generator = torch.Generator(device="cpu").manual_seed(self.seed + self.epoch)
        return torch.randperm(num_samples, generator=generator, device="cpu").tolist()


def _problems(global_batch_size: int, num_replicas: int, rank: int) -> list[str]:
    problems = []
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        problems.append(
            f"rank={rank} is not one of num_replicas={num_replicas}: ranks are counted from 0. Pass"
            " both or none of them."
        )
    elif global_batch_size < 1 or global_batch_size % num_replicas:
        problems.append(
            f"global_batch_size={global_batch_size} is not a positive multiple of the number of"
            f" ranks ({num_replicas}), which each get an equal part of it. Change one of the two."
        )
    return problems
