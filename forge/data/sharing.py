"""How the ranks of a job share an epoch.

`GlobalBatchSampler` makes batches in an order that does not depend on the number of ranks.

The order of a `DistributedSampler` or `GlobalBatchSampler` follows from (seed, epoch), and after k
batches the ranks together have had its first k * global_batch_size samples, whatever their number.
Another number of ranks, or another batch size, continues after that many samples
(`changed_loaders.py`). If these include padding, the epoch is over, because all padding is in its
last batch.

For other loaders the order is unknown. Between two epochs it does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from forge.compat import of_torch
from forge.data import loaders
from forge.errors import ConfigError
from forge.group import collectives


@dataclass(frozen=True)
class Sharing:
    """How a loader is shared, as stored in a checkpoint."""

    num_ranks: int
    num_batches: int | None
    """Batches of each rank in an epoch; None: the loader has no length."""
    global_batch_size: int
    """Samples in a batch of all ranks together; 0: unknown."""
    order: dict[str, Any]
    """The values on which the order depends, in addition to the epoch."""
    unknown: str
    """Why the order is unknown; empty: it is known."""


def of(loader: Any, num_ranks: int) -> Sharing:
    """How `num_ranks` ranks share a loader."""
    num_batches = loaders.num_batches(loader)
    unknown = _unknown(loader)
    if unknown:
        return Sharing(num_ranks, num_batches, 0, {}, unknown)
    sampler, batch_size = _shared(loader)
    kind = DistributedSampler if isinstance(sampler, DistributedSampler) else GlobalBatchSampler
    order = {
        "sampler": kind.__name__,
        "length": len(sampler.dataset),
        "shuffle": bool(sampler.shuffle),
        "seed": int(sampler.seed or 0),
    }
    return Sharing(num_ranks, num_batches, batch_size * sampler.num_replicas, order, "")


def _unknown(loader: Any) -> str:
    """Why the batches of a loader do not follow from its samplers."""
    name = type(loader).__name__
    if loaders.has_state(loader):
        return f"a {name}, which keeps its own position"
    if not isinstance(loader, DataLoader):
        return f"a {name}, which is not a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"samples of an iterable dataset, {type(loader.dataset).__name__}"
    if loaders.has_own_iter(loader) or of_torch.makes_own_iterator(loader):
        return f"a {name}, which has its own __iter__"
    batches: Any = loader.batch_sampler
    if batches is not None and not (_is(batches, GlobalBatchSampler) or _is(batches, BatchSampler)):
        return f"batches of a {type(batches).__name__}"
    sampler, _ = _shared(loader)
    if not (_is(sampler, GlobalBatchSampler) or _is(sampler, DistributedSampler)):
        return f"samples in the order of a {type(sampler).__name__}"
    return ""


def _shared(loader: DataLoader[Any]) -> tuple[Any, int]:
    """The sampler or batch sampler with the order, and the samples that a rank takes per batch."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler, 1
    if isinstance(batches, GlobalBatchSampler):
        return batches, batches.batch_size
    return batches.sampler, batches.batch_size


def _is(one: Any, kind: type[Any]) -> bool:
    """Whether an object yields the same as class `kind`; a subclass can differ."""
    is_plain = isinstance(one, kind) and type(one).__iter__ is kind.__iter__
    return is_plain and not loaders.has_state(one)


class GlobalBatchSampler(Sampler[list[int]]):
    """A batch sampler in which each rank gets an equal part of every global batch.

    `DataLoader(dataset, batch_sampler=forge.data.GlobalBatchSampler(dataset, 256))`: step k has
    the same samples on 1, 2 or 8 ranks, and a job that resumes with another number of ranks
    continues after the same sample. `run.steps` calls `set_epoch`; in a loop over `run.epochs` call
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
