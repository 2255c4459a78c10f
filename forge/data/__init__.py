"""The position of a run in its data, for every kind of loader; random augmentation by index."""

from forge.data.global_batches import GlobalBatchSampler
from forge.data.seeding import seeded

__all__ = ["GlobalBatchSampler", "seeded"]
