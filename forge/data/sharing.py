"""`GlobalBatchSampler`: batches in an order that does not depend on the number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from forge.errors import ConfigError
from forge.group import collectives


class GlobalBatchSampler(Sampler[list[int]]):
    """A batch sampler in which each rank gets an equal part of every global batch.

    `DataLoader(dataset, batch_sampler=forge.data.GlobalBatchSampler(dataset, 256))`: step k has
    the same samples on 1, 2 or 8 ranks, so that the epochs after a resume with another number of
    ranks are the same, too. `run.steps` calls `set_epoch`; in a loop over `run.epochs` call
    it before each pass, as for torch's DistributedSampler.

    Every rank has the same number of batches, all of the same size. If `global_batch_size` does
    not divide the number of samples, `drop_last` drops the last batch; else it is filled with the
    first samples of the epoch.

    Args:
        dataset: Any object with a length; it is not read.
        global_batch_size: Samples per step, over all ranks.
        seed: Seed of the order, which differs in each epoch; the same on every rank. None: the
            order of the dataset.
        drop_last: Whether to drop an incomplete batch.
        num_replicas: Number of ranks; None: from torch.distributed, else 1.
        rank: Number of this rank; None: from torch.distributed.
    Raises:
        ConfigError: If the ranks cannot share a batch equally, or torch.distributed is not
            initialised yet.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch_size: int,
        *,
        seed: int | None = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        what = "This GlobalBatchSampler"
        if num_replicas is None and rank is None:
            when = "before the sampler is made, or pass it num_replicas and rank"
            collectives.check_met(when, what)
        own_rank, size = collectives.rank_and_size()
        num_replicas = size if num_replicas is None else num_replicas
        rank = own_rank if rank is None else rank
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            problem = (
                f"rank={rank} is not below num_replicas={num_replicas}: ranks are numbered from 0."
                " Pass both arguments or none."
            )
            raise ConfigError([problem], what)
        if global_batch_size < 1 or global_batch_size % num_replicas:
            problem = (
                f"global_batch_size={global_batch_size} is not a positive multiple of the number of"
                f" ranks ({num_replicas}), so they cannot have equal parts. Change one of the two."
            )
            raise ConfigError([problem], what)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.batch_size = global_batch_size // num_replicas
        """Samples in a batch of one rank."""
        self.shuffle = seed is not None
        self.seed = seed
        self.drop_last = drop_last
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is used from now on.

        Args:
            epoch: Number of the epoch, from 0.
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
        if self.seed is None:
            return list(range(num_samples))
        # On the CPU, whatever torch's default device is: the same order on all machines.
        generator = torch.Generator(device="cpu").manual_seed(self.seed + self.epoch)
        return torch.randperm(num_samples, generator=generator, device="cpu").tolist()
